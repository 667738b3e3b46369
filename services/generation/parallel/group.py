"""This process among those that compute together, joined by torch.distributed: NCCL on cards, gloo on the CPU.

All that is called here is called by every rank, in the same order. It knows neither models nor steps.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

# Ranks are processes of one machine: what joins them listens nowhere else.
_ON_LOOPBACK = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}

Shape: TypeAlias = tuple[int, ...]


class Group:
    """rank: this process's, of so many `ranks`; device: this rank's own."""

    def __init__(self, rank: int, ranks: int, meeting: Path, device: torch.device) -> None:
        """Joins, and returns once all have. meeting: a file that is not there yet, the same for all."""
        backend = "nccl" if device.type == "cuda" else "gloo"
        os.environ.setdefault(_ON_LOOPBACK[backend], "lo")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(backend, store=FileStore(str(meeting), ranks), rank=rank, world_size=ranks)
        self.rank, self.ranks, self.device = rank, ranks, device
        self.mesh: DeviceMesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("tp",))

    def from_first(self, tensor: Tensor) -> Tensor:
        """Rank 0's tensor on every rank, which brings one of the same shape and type to be written over."""
        dist.broadcast(tensor, src=0)
        return tensor

    def least(self, number: int) -> int:
        """The smallest of what the ranks bring."""
        found = torch.tensor(number, dtype=torch.int64, device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MIN)
        return int(found)

    def leave(self) -> None:
        dist.destroy_process_group()
