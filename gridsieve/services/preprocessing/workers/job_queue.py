"""Runs jobs on worker processes: each job's pieces are made in order, ahead of their reader.

    --inflight-bytes   [job A: made, not read ....][job B ....][free ...]      a third each while there are three jobs

Jobs share the budget of unread bytes evenly; a job that holds nothing may always make one piece, so no job waits for
another job's reader. A worker has one job at a time: if it crashes, hangs, exceeds its memory or breaks the protocol,
that costs one job. `jobs` defines the jobs, `worker_pool` owns the processes. Everything belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Generic, Self, TypeAlias, TypeVar

import numpy as np

from gridsieve.common.contract.errors import InvalidRequest, MediaDamaged, MediaRejected, PeerContract, Unavailable
from gridsieve.common.sealed_memory import SealedMemory, sealed
from gridsieve.common.yielding import call_yields
from gridsieve.services.preprocessing.sources.source import resource_errors_as_overloaded
from gridsieve.services.preprocessing.workers.jobs import Job
from gridsieve.services.preprocessing.workers.limits import Limits
from gridsieve.services.preprocessing.workers.process import Fault, WorkerFault, WorkerProcess
from gridsieve.services.preprocessing.workers.protocol import PROGRESS_S, Facts, Kind, Message
from gridsieve.services.preprocessing.workers.worker_pool import BackgroundTasks, WorkerPool

T = TypeVar("T")
Made: TypeAlias = asyncio.Queue[T | BaseException | None]

# A worker that is granted the next piece before it has sent the last one never waits for the event loop.
_GRANTS = 2
_REFUSALS = {each.reason: each for each in (InvalidRequest, MediaRejected, MediaDamaged)}
# Each unread piece holds a descriptor and a mapping, however small it is.
MIN_PIECE_BYTES = 2**20


class InFlightBudget:
    """The budget of unread bytes that all jobs share: at most `size_bytes`, plus one piece for each job.

    held_bytes: of pieces that are made, or that a worker may make, and that are not read yet. shares: jobs.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.held_bytes = 0
        self.shares = 0
        self._changed = asyncio.Event()

    def share(self, piece_bytes: int) -> Share:
        """A new job's share of the budget. The job closes it."""
        self.shares += 1
        return Share(self, max(piece_bytes, MIN_PIECE_BYTES))

    async def wait_for_change(self) -> None:
        """Returns when bytes are released or `wake` is called."""
        await self._changed.wait()

    def wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class Share:
    """The bytes of the budget that one job holds."""

    def __init__(self, budget: InFlightBudget, piece_bytes: int) -> None:
        self._budget = budget
        self._piece_bytes = piece_bytes
        self._held_bytes = 0

    def try_acquire(self) -> bool:
        """Acquires room for one piece, or returns False where there is none."""
        budget = self._budget
        mine, total = self._held_bytes + self._piece_bytes, budget.held_bytes + self._piece_bytes
        if self._held_bytes and (mine > budget.size_bytes // budget.shares or total > budget.size_bytes):
            return False
        self._held_bytes = mine
        budget.held_bytes = total
        return True

    async def acquire(self) -> None:
        """Waits until there is room for one piece, and acquires it."""
        while not self.try_acquire():
            await self._budget.wait_for_change()

    def release(self) -> None:
        """Releases the room of one piece."""
        self._held_bytes -= self._piece_bytes
        assert self._held_bytes >= 0, "released twice"
        self._budget.held_bytes -= self._piece_bytes
        self._budget.wake()

    def close(self) -> None:
        """Releases everything that the job holds."""
        self._budget.held_bytes -= self._held_bytes
        self._held_bytes = 0
        self._budget.shares -= 1
        self._budget.wake()


@dataclass(slots=True, eq=False)
class _RunningJob(Generic[T]):
    """A job that a worker runs.

    gives_way: it gives its worker to another job that waits for one.
    """

    job: Job[T]
    gives_way: bool
    share: Share
    left_s: float
    progress: int
    done: int = 0
    made: Made[T] = field(default_factory=asyncio.Queue)


class JobQueue:
    """Jobs for a pool of `size` workers, which run between entering and leaving. Entering raises StartupError."""

    def __init__(
        self,
        size: int,
        limits: Limits,
        inflight_bytes: int,
        on_replaced: Callable[[Fault], None],
        entry: str = "gridsieve.services.preprocessing.workers.worker",
    ) -> None:
        """inflight_bytes: budget of pieces that are made and not yet read. entry: the module that workers run."""
        self.workers = WorkerPool(size, limits, on_replaced, entry)
        self.inflight = InFlightBudget(inflight_bytes)
        self._limits = limits
        self._making = BackgroundTasks()
        self._open = False

    async def __aenter__(self) -> Self:
        await self.workers.__aenter__()
        self._open = True
        return self

    async def __aexit__(self, *_: object) -> None:
        self._open = False
        await self._making.cancel()
        await self.workers.__aexit__()

    @property
    def jobs(self) -> int:
        """Jobs that run or wait for a worker."""
        return self.inflight.shares

    @property
    def idle(self) -> int:
        """Workers that no job has, waits for, or is about to wait for; some may still be stopping their last job."""
        return max(0, self.workers.size - len(self._making))

    async def call(self, job: Job[T]) -> T:
        """Runs a job of one piece and returns the piece. Raises as `stream` does."""
        async with self.stream(job, piece_bytes=0) as pieces:
            return await anext(pieces)

    @asynccontextmanager
    async def stream(
        self, job: Job[T], gives_way: bool = False, piece_bytes: int | None = None
    ) -> AsyncIterator[AsyncGenerator[T, None]]:
        """The job's pieces in order, made as far ahead of the reader as the in-flight budget allows.

        A piece counts as read when the next one is asked for. Leaving the block stops the job.
        gives_way: whether it gives its worker to another job that waits for one, as it does if the running call yields
        to others. piece_bytes: of the in-flight budget
        for each piece; None: those of the job.
        Raises MediaRejected if the media exceed the limits or crash their worker, Overloaded where the machine is out
        of descriptors or memory, Unavailable if the service is stopping, PeerContract if the worker breaks the
        protocol.
        """
        if not self._open:
            raise _stopping()
        work_s = self._limits.work_s(job.frames)
        share = self.inflight.share(job.piece_bytes if piece_bytes is None else piece_bytes)
        run = _RunningJob(job, gives_way or call_yields(), share, work_s, round(work_s / PROGRESS_S) + job.pieces)
        task = self._making.start(self._make(run))
        # A callback rather than `finally` in the task: a task that is cancelled before its first step runs no code.
        task.add_done_callback(lambda made: run.made.put_nowait(_stopping()) if made.cancelled() else None)
        try:
            async with aclosing(_read(run)) as pieces:
                yield pieces
        finally:
            task.cancel()
            run.share.close()

    async def _make(self, run: _RunningJob[T]) -> None:
        """Makes the run's pieces on one worker, or on several in turn if other jobs wait while its reader is slow.

        Where the machine is out of descriptors or memory, the run ends as Overloaded and the worker is kept.
        """
        name = run.job.source.name
        try:
            with resource_errors_as_overloaded(name):
                while run.done < run.job.pieces:
                    await run.share.acquire()
                    async with self.workers.borrow(name, self.inflight.wake, run.gives_way) as worker:
                        await self._make_some(run, worker)
            run.made.put_nowait(None)
        except Exception as error:
            run.made.put_nowait(error)

    async def _make_some(self, run: _RunningJob[T], worker: WorkerProcess) -> None:
        """Makes pieces from `run.done` on, until all are made or the worker is given to a waiting job.

        Room for the first piece is already acquired.
        """
        job = run.job
        _send_job(worker, job, run.done)
        worker.send(Kind.NEXT)
        granted = run.done + 1
        while run.done < job.pieces:
            grants = 0 if run.gives_way and self.workers.pressing else _GRANTS
            while granted < min(run.done + grants, job.pieces) and run.share.try_acquire():
                worker.send(Kind.NEXT)
                granted += 1
            if granted > run.done:
                piece = await self._receive_piece(run, worker)
                run.made.put_nowait(piece)
                run.done += 1
            elif self.workers.waiting:
                return
            else:
                await self.inflight.wait_for_change()

    async def _receive_piece(self, run: _RunningJob[T], worker: WorkerProcess) -> T:
        message = await self._receive(run, worker)
        while message.kind is Kind.PROGRESS:
            message.close()
            run.progress -= 1
            if run.progress < 0:  # a worker may not keep the event loop busy
                raise PeerContract("a worker reports progress too often")
            message = await self._receive(run, worker)
        if message.kind is Kind.FAILED and not message.descriptors:
            raise failure_of(message.facts, self._limits)
        if message.kind is not Kind.PIECE or len(message.descriptors) > 1:
            message.close()
            raise PeerContract(f"a worker sent {message.kind} instead of a piece, or too many arrays")
        if message.truncated:  # this process had no free descriptor for the array
            message.close()
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        memory = SealedMemory(message.descriptors[0]) if message.descriptors else None
        data = np.empty(0, np.uint8) if memory is None else memory.mapped(run.job.piece_bytes)
        return run.job.piece(run.done, message.facts, data, memory)

    async def _receive(self, run: _RunningJob[T], worker: WorkerProcess) -> Message:
        clock = asyncio.get_running_loop().time
        start, limits = clock(), self._limits
        try:
            async with asyncio.timeout(min(limits.stall_s, run.left_s)):
                return await worker.receive()
        except TimeoutError as error:
            text = f"it made no progress for {limits.stall_s:g} s"
            if run.left_s < limits.stall_s:
                text = f"{run.job.frames} frames of it took more than {limits.work_s(run.job.frames):g} s"
            raise WorkerFault(Fault.SLOW, text) from error
        finally:
            run.left_s -= clock() - start


def failure_of(facts: Facts, limits: Limits) -> Exception:
    """The error that a worker's FAILED message becomes."""
    reason, text = map(facts.text, ("reason", "text"))
    if reason == "MEMORY":
        return WorkerFault(Fault.MEMORY, f"it needed more than {limits.memory_bytes >> 20} MiB")
    if reason in _REFUSALS:
        more = {name: facts.text(name) or None for name in ("field", "value", "limit", "remedy")}
        return _REFUSALS[reason](text, **more)
    return PeerContract(f"a worker failed: {text}")


def _stopping() -> Unavailable:
    return Unavailable("preprocessing is stopping", "preprocessing")


def _send_job(worker: WorkerProcess, job: Job[T], done: int) -> None:
    order = job.order(done)
    facts = Facts({"job": order.name, "media": job.source.name, "pieces": job.pieces - done, **order.facts})
    numbers = sealed(order.numbers.data)
    try:
        worker.send(Kind.JOB, facts, (job.source.descriptor, numbers))
    finally:
        os.close(numbers)


async def _read(run: _RunningJob[T]) -> AsyncGenerator[T, None]:
    while (made := await run.made.get()) is not None:
        if isinstance(made, BaseException):
            raise made
        yield made
        run.share.release()
