"""Jobs of reading and decoding strangers' media, each made piece by piece by a worker process, ahead of its reader.

A worker has one job at a time. If it crashes, hangs, takes too much memory or says what cannot be true, that costs one
job. `jobs` says what can be asked of it, `inflight` how far it may run ahead of a reader, `crew` who works.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Generic, Self, TypeAlias, TypeVar

import numpy as np

from common.contract.errors import InvalidRequest, MediaDamaged, MediaRejected, PeerContract, Unavailable
from services.preprocessing.sources.memory import mapped, sealed
from services.preprocessing.sources.source import own_lack_told
from services.preprocessing.workers.crew import Background, Crew
from services.preprocessing.workers.inflight import InFlight, Share
from services.preprocessing.workers.jobs import Job
from services.preprocessing.workers.limits import Limits
from services.preprocessing.workers.process import Fault, WorkerFault, WorkerProcess
from services.preprocessing.workers.protocol import Facts, Kind

T = TypeVar("T")
Made: TypeAlias = asyncio.Queue[T | BaseException | None]

# A worker that was told to make the next piece before it sent the last never waits for the event loop.
_GRANTS = 2
_REFUSALS = {each.reason: each for each in (InvalidRequest, MediaRejected, MediaDamaged)}


@dataclass(slots=True, eq=False)
class _Run(Generic[T]):
    """A job on its way: how many pieces are done, and for how many seconds more a worker may work on it."""

    job: Job[T]
    share: Share
    left_s: float
    done: int = 0
    made: Made[T] = field(default_factory=asyncio.Queue)


class Pool:
    """Jobs for a crew of `size` workers, which are there from entering to leaving; entering raises what `Crew` does."""

    def __init__(
        self,
        size: int,
        limits: Limits,
        inflight_bytes: int,
        on_replaced: Callable[[Fault], None],
        entry: str = "services.preprocessing.workers.worker",
    ) -> None:
        """inflight_bytes: of pieces that are made and wait for their readers. entry: the module that workers run."""
        self.crew = Crew(size, limits, on_replaced, entry)
        self.inflight = InFlight(inflight_bytes)
        self._limits = limits
        self._making = Background()
        self._open = False

    async def __aenter__(self) -> Self:
        await self.crew.__aenter__()
        self._open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open = False
        await self._making.cancel()
        await self.crew.__aexit__(kind, error, trace)

    @property
    def jobs(self) -> int:
        """How many have been asked for and not left."""
        return self.inflight.shares

    @property
    def inflight_bytes(self) -> int:
        """Of pieces that are made, or may be, and are not read."""
        return self.inflight.held_bytes

    async def call(self, job: Job[T]) -> T:
        """The only piece of a job that has one."""
        async with self._running(job, piece_bytes=0) as pieces:
            return await anext(pieces)

    @asynccontextmanager
    async def ahead(self, job: Job[T]) -> AsyncIterator[AsyncGenerator[T, None]]:
        """The job's pieces in order, made as far ahead of the reader as the bytes in flight allow.

        A piece counts as read when the next one is asked for. On leaving the job is stopped.
        Raises MediaRejected if the media cost more than the limits allow, or end their worker; Overloaded where
        descriptors or memory lack.
        """
        async with self._running(job, job.piece_bytes) as pieces:
            yield pieces

    @asynccontextmanager
    async def _running(self, job: Job[T], piece_bytes: int) -> AsyncIterator[AsyncGenerator[T, None]]:
        if not self._open:
            raise _stopping()
        run = _Run(job, self.inflight.share(piece_bytes), self._limits.wall_s)
        task = self._making.start(self._make(run))
        # Not in the task: one that is cancelled before it starts runs no line of its own.
        task.add_done_callback(lambda made: run.made.put_nowait(_stopping()) if made.cancelled() else None)
        try:
            async with aclosing(_taken(run)) as taken:
                yield taken
        finally:
            task.cancel()
            run.share.close()

    async def _make(self, run: _Run[T]) -> None:
        """The run's pieces, by one worker, or by several in turn where others wait while nobody reads.

        Where descriptors or memory lack, the run ends as Overloaded, and its worker goes on.
        """
        name = run.job.source.name
        try:
            with own_lack_told(name):
                while run.done < run.job.pieces:
                    await run.share.take()
                    async with self.crew.lent(name, self.inflight.wake) as worker:
                        await self._make_some(run, worker)
            run.made.put_nowait(None)
        except Exception as error:
            run.made.put_nowait(error)

    async def _make_some(self, run: _Run[T], worker: WorkerProcess) -> None:
        """Pieces from `run.done` on, the first of which has room, till all are made or the worker is better used."""
        job = run.job
        _begin(worker, job, run.done)
        worker.tell(Kind.NEXT)
        granted = run.done + 1
        while run.done < job.pieces:
            while granted < min(run.done + _GRANTS, job.pieces) and run.share.try_take():
                worker.tell(Kind.NEXT)
                granted += 1
            if granted > run.done:
                piece = await self._piece(run, worker)
                run.made.put_nowait(piece)
                run.done += 1
            elif self.crew.waiting:
                return
            else:
                await self.inflight.changed()

    async def _piece(self, run: _Run[T], worker: WorkerProcess) -> T:
        clock = asyncio.get_running_loop().time
        start = clock()
        try:
            async with asyncio.timeout(run.left_s):
                message = await worker.receive()
        except TimeoutError as error:
            raise WorkerFault(Fault.SLOW, f"it took more than {self._limits.wall_s:g} s") from error
        finally:
            run.left_s -= clock() - start
        if message.kind is Kind.FAILED and not message.descriptors:
            raise self._failure(message.facts)
        if message.kind is not Kind.PIECE or len(message.descriptors) > 1:
            message.close()
            raise PeerContract(f"a worker sent {message.kind} in place of a piece, or too many arrays")
        if message.cut:  # an array that it should hold has found no free descriptor here
            message.close()
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        data = [mapped(each, run.job.piece_bytes) for each in message.descriptors]
        return run.job.piece(run.done, message.facts, data[0] if data else np.empty(0, np.uint8))

    def _failure(self, facts: Facts) -> Exception:
        """What a worker says has gone wrong."""
        reason, text = facts.text("reason"), facts.text("text")
        if reason == "MEMORY":
            return WorkerFault(Fault.MEMORY, f"it needed more than {self._limits.memory_bytes >> 20} MiB")
        return _REFUSALS[reason](text) if reason in _REFUSALS else PeerContract(f"a worker failed: {text}")


@asynccontextmanager
async def started(*pools: Pool) -> AsyncIterator[None]:
    """Pools that start side by side. Raises StartupError if any cannot be started; then the others have stopped too."""
    async with AsyncExitStack() as stack:
        try:
            async with asyncio.TaskGroup() as starting:
                for pool in pools:
                    starting.create_task(stack.enter_async_context(pool))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        yield


def _stopping() -> Unavailable:
    return Unavailable("preprocessing is stopping", "preprocessing")


def _begin(worker: WorkerProcess, job: Job[T], done: int) -> None:
    order = job.order(done)
    facts = Facts({"job": order.name, "media": job.source.name, "pieces": job.pieces - done, **order.facts})
    numbers = sealed(order.numbers.data)
    try:
        worker.tell(Kind.JOB, facts, (job.source.descriptor, numbers))
    finally:
        os.close(numbers)


async def _taken(run: _Run[T]) -> AsyncGenerator[T, None]:
    while (made := await run.made.get()) is not None:
        if isinstance(made, BaseException):
            raise made
        yield made
        run.share.give()
