"""The process group of the ranks of a service, on one machine: NCCL on CUDA, gloo on the CPU."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from gridsieve.common.contract.errors import StartupError
from gridsieve.common.ranks import heeding_signals

# Only loopback is listened on.
_INTERFACES = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


def join(
    meeting: Path,
    rank: int,
    ranks: int,
    device: torch.device,
    flag: str,
    timeout: timedelta,
    bound_to: torch.device | None = None,
) -> FileStore:
    """Makes torch's default process group. Returns what the ranks share once all have joined.

    meeting: a file that only these ranks use, empty or missing. flag: of the setting that says how many ranks there
    are. timeout: for joining, and for each operation. bound_to: NCCL connects the ranks at once, not at first use.
    Raises StartupError if a rank does not join in time.
    """
    for name, interface in _INTERFACES.items():
        os.environ.setdefault(name, interface)
    store = FileStore(str(meeting), ranks)
    backend = "nccl" if device.type == "cuda" else "gloo"
    try:
        heeding_signals(
            lambda: dist.init_process_group(
                backend, store=store, rank=rank, world_size=ranks, timeout=timeout, device_id=bound_to
            )
        )
    except RuntimeError as error:
        raise StartupError(f"{flag} {ranks}: the ranks cannot reach each other: {error}") from error
    return store


def leave(device: torch.device) -> None:
    """Destroys a gloo group. NCCL's stays, since its destruction waits for other ranks and for captured graphs.

    A process that has an NCCL group therefore ends by os._exit.
    """
    if device.type != "cuda":
        dist.destroy_process_group()
