"""Communication between ranks: collective operations, the worker processes that rank 0 starts, and steps as bytes.

Collective operations go through torch.distributed (NCCL on CUDA, gloo on the CPU) and must be called by every rank in
the same order. Steps go from rank 0 to each worker over a socket. This module does not know models.
"""

from __future__ import annotations

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

# A serialised step: int64 numbers, first `num_decodes` and the size of each part, then the parts.
_PARTS = 15
_HEADER = 1 + _PARTS
_DIGEST_NUMBERS = 4  # int64 numbers of an adapter's 32-byte digest

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
    """A packed batch, to be sent to a worker."""
    contexts, adapted = packed.contexts, packed.adapted
    parts = [
        packed.ids,
        packed.positions.ravel(),
        packed.slots,
        packed.media_rows,
        packed.unread_rows,
        packed.logit_rows,
        np.array([each.start for each in contexts], np.int64),
        np.array([each.end for each in contexts], np.int64),
        np.array([len(each.blocks) for each in contexts], np.int64),
        np.concatenate([np.asarray(each.blocks, np.int64) for each in contexts]),
        np.array([each.start for each in adapted], np.int64),
        np.array([each.end for each in adapted], np.int64),
        np.frombuffer(b"".join(each.digest for each in adapted), np.int64),
        np.array([[each.read, each.write] for each in packed.states], np.int64).ravel(),
        np.array([(n, *save) for n, each in enumerate(packed.states) for save in each.saves], np.int64).ravel(),
    ]
    assert len(parts) == _PARTS
    header = np.array([packed.num_decodes, *(part.size for part in parts)], np.int64)
    return np.concatenate([header, *parts]).tobytes()


def from_bytes(data: bytes) -> Packed:
    """The packed batch that `to_bytes` serialised."""
    numbers = np.frombuffer(data, np.int64)
    num_decodes, *sizes = numbers[:_HEADER].tolist()
    # Copied: torch requires writable arrays.
    parts = (
        numbers[_HEADER + end - size : _HEADER + end].copy() for size, end in zip(sizes, accumulate(sizes), strict=True)
    )
    ids, positions, slots, media_rows, unread_rows, logit_rows, *parts_of_chunks = parts
    starts, ends, counts, blocks, firsts, lasts, digests, states, saves = parts_of_chunks
    saved: dict[int, list[tuple[int, int]]] = {}
    for chunk, tokens, slot in saves.reshape(-1, 3).tolist():
        saved.setdefault(chunk, []).append((tokens, slot))
    each = zip(starts.tolist(), ends.tolist(), counts.tolist(), accumulate(counts.tolist()), strict=True)
    return Packed(
        contexts=tuple(Context(start, end, blocks[last - count : last]) for start, end, count, last in each),
        num_decodes=num_decodes,
        ids=ids,
        positions=positions.reshape(3, -1),
        slots=slots,
        media_rows=media_rows,
        unread_rows=unread_rows,
        logit_rows=logit_rows,
        adapted=tuple(
            AdaptedRows(digest.tobytes(), start, end)
            for start, end, digest in zip(
                firsts.tolist(), lasts.tolist(), digests.reshape(-1, _DIGEST_NUMBERS), strict=True
            )
        ),
        states=tuple(
            StateUse(read, write, tuple(saved.get(chunk, ())))
            for chunk, (read, write) in enumerate(states.reshape(-1, 2).tolist())
        ),
    )
