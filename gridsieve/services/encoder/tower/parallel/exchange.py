"""Transfers between ranks: frames to another rank, embeddings back, one tensor each way.

    rank 0 ── frames, (all values of all slices of a share,), their dtype ──────────▶ rank r
           ◀── embeddings, (1 + levels, all tokens of these, D), the tower's dtype ──

Rank 0 sends a rank the shapes before the transfer, so both sides know every size. Transfers are point to point, not
collective: a rank without a share has no pending transfer, which would keep its GPU busy and time out.
It knows neither which rank encodes what nor how messages reach ranks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from gridsieve.services.compute.transfers import to_device
from gridsieve.services.encoder.tower.patches import Frames, KeptFrames, TimedFrames, pixels_of

# For all ranks to join, for encoding one share, and for one transfer once both sides are ready for it.
TIMEOUT = timedelta(minutes=5)


class Exchange:
    """Transfers between this rank and others. group: of torch.distributed.

    All methods raise RuntimeError if the other side has ended or exceeds the timeout of the group.
    """

    def __init__(self, group: Any) -> None:
        self._group = group

    def send(self, tensor: Tensor, rank: int) -> Any:
        """Starts sending; the tensor must not change until `wait` of the returned work has returned."""
        return self._group.send([tensor], rank, 0)

    def receive(self, tensor: Tensor, rank: int) -> Tensor:
        """Receives into `tensor`, and returns it."""
        self._group.recv([tensor], rank, 0).wait()
        return tensor


def packed(slices: Sequence[Frames], device: torch.device) -> Tensor:
    """All values of the slices as one tensor on `device`: (values,)."""
    return to_device(torch.cat([pixels_of(each).reshape(-1) for each in slices]), device)


def announced(slices: Sequence[Frames], adapter: bytes = b"") -> bytes:
    """The shapes of slices, what else they have beside their pixels, and the digest of their adapter."""
    return json.dumps([adapter.hex(), *([list(each.shape), _facts(each)] for each in slices)]).encode()


def adapter_of(order: bytes) -> bytes:
    """The digest of the adapter of an announced share; empty: none."""
    return bytes.fromhex(json.loads(order)[0])


def values_of(order: bytes) -> int:
    """How many values an announced share has."""
    return sum(math.prod(shape) for shape, _ in json.loads(order)[1:])


def unpacked(values: Tensor, order: bytes) -> list[Frames]:
    """The inverse of `packed`. order: as `announced`."""
    announced = json.loads(order)[1:]
    parts = values.split([math.prod(shape) for shape, _ in announced])
    return [_frames(part.view(*shape), **facts) for part, (shape, facts) in zip(parts, announced, strict=True)]


def _facts(frames: Frames) -> dict[str, Any]:
    match frames:
        case TimedFrames():
            return {"times": frames.times}
        case KeptFrames():
            return {"grid": frames.grid, "kept": frames.kept}
    return {}


def _frames(frames: Tensor, times: Sequence[int] = (), grid: Sequence[int] = (), kept: Sequence[int] = ()) -> Frames:
    if grid:
        rows, columns = grid
        return KeptFrames(frames, (rows, columns), tuple(kept))
    return TimedFrames(frames, tuple(times)) if times else frames
