"""This process among those that compute together, joined by torch.distributed: NCCL on cards, gloo on the CPU.

All that is called here is called by every rank, in the same order. It knows neither models nor steps.
"""

from __future__ import annotations

import os
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from common.contract.errors import StartupError
from common.ranks import heeding_signals

# Ranks are processes of one machine: what joins them listens nowhere else.
_ON_LOOPBACK = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}

# For one rank to wait for another, which may still read its part of the model. Beyond, what waits fails on gloo, and
# NCCL ends the process; it does not watch replayed graphs.
_TIMEOUT = timedelta(minutes=2)


class Group:
    """rank: this process's, of so many `ranks`; device: this rank's own."""

    def __init__(self, rank: int, ranks: int, meeting: Path, device: torch.device) -> None:
        """Joins, and returns once all have. meeting: a file, empty or not there yet, the same for all.

        Raises StartupError if they do not come.
        """
        backend = "nccl" if device.type == "cuda" else "gloo"
        os.environ.setdefault(_ON_LOOPBACK[backend], "lo")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        try:
            heeding_signals(partial(_join, backend, meeting, rank, ranks))
        except RuntimeError as error:
            raise StartupError(f"--tensor-parallel {ranks}: the ranks cannot reach each other: {error}") from error
        self.rank, self.ranks, self.device = rank, ranks, device
        self.mesh: DeviceMesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("tp",))

    def from_first(self, tensor: Tensor) -> Tensor:
        """Rank 0's tensor on every rank, which brings one of the same shape and type to be written over."""
        dist.broadcast(tensor, src=0)
        return tensor

    def total(self, tensor: Tensor) -> Tensor:
        """What the ranks bring, added up; written over what each brought."""
        dist.all_reduce(tensor)
        return tensor

    def least(self, number: int) -> int:
        """The smallest of what the ranks bring."""
        found = torch.tensor(number, dtype=torch.int64, device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MIN)
        return int(found)

    def leave(self) -> None:
        """Gives the group up, but for NCCL's: that waits for the other ranks, and for graphs that hold a part of it.

        A process that has one ends by os._exit.
        """
        if self.device.type != "cuda":
            dist.destroy_process_group()

    def agree(self, number: int) -> bool:
        """Whether all ranks bring the same."""
        return self.least(number) == -self.least(-number)


def _join(backend: str, meeting: Path, rank: int, ranks: int) -> None:
    store = FileStore(str(meeting), ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=_TIMEOUT)
