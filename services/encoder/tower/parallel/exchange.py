"""What ranks send each other: frames to whoever runs them, embeddings back, one tensor each way.

    rank 0 ── frames, uint8 (all values of all slices of a share,) ─────────────────▶ rank r
           ◀── embeddings, (1 + levels, all tokens of these, D), the tower's dtype ──

A rank is told what comes before it comes, so either side knows every size. Point to point, and nothing collective: who
has no share takes no part, and has no transfer pending, which would keep a card busy and time out.
It knows neither who runs what nor how ranks are told.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from common.contract.errors import StartupError
from common.ranks import heeding_signals
from services.encoder.tower.forward import send

# To meet, for a share to be run, and for one transfer, which begins when both sides are ready for it.
TIMEOUT = timedelta(minutes=5)
# Ranks are on one machine, and nobody outside has any business with them.
_INTERFACES = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}

Shape: TypeAlias = Sequence[int]


def join(meeting: Path, rank: int, ranks: int, device: torch.device) -> Any:
    """A process group of `ranks`, NCCL's on cards and gloo's elsewhere. Returns once all are there.

    meeting: a file, empty or not there yet, that is theirs alone. Raises StartupError if they do not come.
    """
    on_cards = device.type == "cuda"
    for name, interface in _INTERFACES.items():
        os.environ.setdefault(name, interface)
    try:
        heeding_signals(
            partial(
                dist.init_process_group,
                "nccl" if on_cards else "gloo",
                init_method=f"file://{meeting}",
                rank=rank,
                world_size=ranks,
                timeout=TIMEOUT,
                device_id=device if on_cards else None,
            )
        )
    except RuntimeError as error:
        raise StartupError(f"the {ranks} ranks of the tower cannot reach each other: {error}") from error
    return dist.group.WORLD


def leave(device: torch.device) -> None:
    """Gives the group up, but for NCCL's, which waits for the other ranks: a process that has one ends by os._exit."""
    if device.type != "cuda":
        dist.destroy_process_group()


class Exchange:
    """Transfers between this rank and others. group: of torch.distributed.

    RuntimeError is raised where the other side is gone or takes longer than the group allows.
    """

    def __init__(self, group: Any) -> None:
        self._group = group

    def send(self, tensor: Tensor, rank: int) -> Any:
        """Begins to send a tensor, which stays as it is until `wait` of what is returned has returned."""
        return self._group.send([tensor], rank, 0)

    def receive(self, tensor: Tensor, rank: int) -> Tensor:
        """Fills `tensor` with what the rank sends, and returns it."""
        self._group.recv([tensor], rank, 0).wait()
        return tensor


def packed(slices: Sequence[Tensor], device: torch.device) -> Tensor:
    """All values of frames, uint8 (F, H, W, 3) each: uint8 (values,) on `device`."""
    return send(torch.cat([frames.reshape(-1) for frames in slices]), device)


def unpacked(values: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    """`packed`, undone."""
    parts = values.split([math.prod(shape) for shape in shapes])
    return [part.view(*shape) for part, shape in zip(parts, shapes, strict=True)]
