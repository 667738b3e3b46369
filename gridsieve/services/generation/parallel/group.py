"""Communication between ranks: collective operations, the worker processes that rank 0 starts, and steps as bytes.

Collective operations go through torch.distributed (NCCL on CUDA, gloo on the CPU) and must be called by every rank in
the same order. Steps go from rank 0 to each worker over a socket. This module does not know models.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import accumulate, count
from pathlib import Path

import numpy as np
import structlog
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gridsieve.common.process import ExitStatus
from gridsieve.common.ranks import Ranks, meeting_place
from gridsieve.services.compute.group import join, leave
from gridsieve.services.compute.rank_failure import RankFailure
from gridsieve.services.generation.request.batch import AdaptedRows, Context, Packed, StateUse

WORKER_MODULE = "gridsieve.services.generation.startup.rank"

# How long a rank waits for another, which may still be loading its weights. Afterwards gloo's operation fails and NCCL
# ends the process; NCCL does not watch operations inside replayed graphs.
_TIMEOUT = timedelta(minutes=2)

# How long a rank that failed waits for the others to fail alike.
_ANSWER = timedelta(seconds=30)

# Arrays of a packed batch, int64, in the order in which they are sent.
_ARRAYS = ("ids", "positions", "slots", "media_rows", "logit_rows", "unread_rows")

log = structlog.get_logger()


class Group:
    """The process group of all `ranks`, as seen by one `rank` and its `device`."""

    def __init__(self, rank: int, ranks: int, meeting: Path, device: torch.device) -> None:
        """Joins the group; returns once all ranks have. meeting: a file, empty or missing, the same for all ranks.

        Raises StartupError if a rank does not join within the timeout.
        """
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self._store = join(meeting, rank, ranks, device, "--tensor-parallel", _TIMEOUT)
        self.rank, self.ranks, self.device = rank, ranks, device
        self._attempts = count()
        self.mesh: DeviceMesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("tp",))

    def from_first(self, tensor: Tensor) -> Tensor:
        """Broadcasts rank 0's tensor; the other ranks pass one of the same shape and dtype to be overwritten."""
        dist.broadcast(tensor, src=0)
        return tensor

    def total(self, tensor: Tensor) -> Tensor:
        """The sum of all ranks' tensors, in place."""
        dist.all_reduce(tensor)
        return tensor

    def least(self, number: int) -> int:
        """The minimum over all ranks."""
        found = torch.tensor(number, dtype=torch.int64, device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MIN)
        return int(found)

    def agree(self, number: int) -> bool:
        """Whether all ranks pass the same number."""
        return self.least(number) == -self.least(-number)

    def end_unless_alike(self, done: bool, what: str, remedy: str) -> None:
        """Ends this process, and by that all ranks, unless all of them have done what each tried, or none has.

        what, remedy: are logged. Not a collective operation: a rank that failed inside of one has left the others in
        it. These do not answer, which after 30 s counts as another outcome.
        """
        attempt = next(self._attempts)
        names = [f"attempt {attempt} of rank {each}" for each in range(self.ranks)]
        self._store.set(names[self.rank], str(done))
        with suppress(RuntimeError):  # the time is up
            self._store.wait(names, _TIMEOUT if done else _ANSWER)
        outcomes = [self._store.get(name).decode() if self._store.check([name]) else "" for name in names]
        if len(set(outcomes)) == 1:
            return
        failed = [str(rank) for rank, outcome in enumerate(outcomes) if outcome != str(True)]
        if not done and "" in outcomes:
            failed = [str(self.rank)]
        where = f"failed on rank {', '.join(failed)} alone"
        log.error("cannot start", error=f"--tensor-parallel {self.ranks}: {what} {where}: {remedy}")
        os._exit(ExitStatus.CANNOT_START)


class WorkerRanks:
    """Rank 0's handle on the worker processes. failure: recorded when one of them ends."""

    def __init__(self, count: int, arguments: Sequence[str], device: torch.device, module: str = WORKER_MODULE) -> None:
        """Starts the workers and returns once all ranks have joined the group.

        count: ranks, this one included. arguments: this service's flags, which each worker parses itself.
        Raises StartupError if they do not join.
        """
        self.failure = RankFailure()
        meeting = meeting_place()
        facts = {"arguments": list(arguments), "meeting": str(meeting)}
        self.ranks = Ranks(module, count, facts, self.failure.record)
        self.group = Group(0, count, meeting, device)
        log.info("ranks", count=count, others=self.ranks.pids)

    def broadcast(self, packed: Packed, media_embeds: Tensor | None, unread: Tensor | None) -> None:
        """Sends the next step to all workers. Arguments as in `Runner.compute`. Raises OSError if one ended."""
        self.ranks.broadcast(to_bytes(packed))
        for tensor in (media_embeds, unread):
            if tensor is not None:
                self.group.from_first(tensor)

    def close(self, in_step: bool = True) -> None:
        """in_step: whether all ranks have executed the same steps; if not, leaving the group could block for ever."""
        self.ranks.close()
        if in_step and self.failure.cause is None:
            leave(self.group.device)


def to_bytes(packed: Packed) -> bytes:
    """A packed batch, to be sent to a worker: a line of JSON, then its arrays and the blocks of all contexts."""
    arrays = [getattr(packed, name) for name in _ARRAYS]
    header = {
        "sizes": [each.size for each in arrays],
        "contexts": [(each.start, each.end, len(each.blocks)) for each in packed.contexts],
        "num_decodes": packed.num_decodes,
        "adapted": [(each.digest.hex(), each.start, each.end) for each in packed.adapted],
        "states": packed.states,
    }
    blocks = [np.asarray(each.blocks, np.int64) for each in packed.contexts]
    numbers = np.concatenate([*(each.ravel() for each in arrays), *blocks])
    return json.dumps(header, default=int).encode() + b"\n" + numbers.tobytes()


def from_bytes(data: bytes) -> Packed:
    """The packed batch that `to_bytes` serialised."""
    begin = data.index(b"\n") + 1
    header = json.loads(data[:begin])
    # Copied: torch requires writable arrays.
    numbers = np.frombuffer(data, np.int64, offset=begin).copy()
    *arrays, blocks = np.split(numbers, np.cumsum(header["sizes"]))
    named = dict(zip(_ARRAYS, arrays, strict=True))
    named["positions"] = named["positions"].reshape(3, -1)
    ends = accumulate(count for _, _, count in header["contexts"])
    return Packed(
        contexts=tuple(
            Context(start, end, blocks[last - count : last])
            for (start, end, count), last in zip(header["contexts"], ends, strict=True)
        ),
        num_decodes=header["num_decodes"],
        adapted=tuple(AdaptedRows(bytes.fromhex(digest), *rows) for digest, *rows in header["adapted"]),
        states=tuple(
            StateUse(read, write, tuple((tokens, slot) for tokens, slot in saves))
            for read, write, saves in header["states"]
        ),
        **named,
    )
