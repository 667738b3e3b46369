"""The worker processes that read and decode strangers' media, and who of those that wait is given one.

A worker has one job at a time. If it crashes, hangs, takes too much memory or says what cannot be true, that costs one
job, and the worker is replaced. `jobs` says what can be asked of it, `inflight` how far it may run ahead of a reader.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from time import monotonic_ns
from types import TracebackType
from typing import Generic, Self, TypeAlias, TypeVar

import numpy as np
import structlog

from common.errors import InvalidRequest, MediaDamaged, MediaRejected, PeerContract, StartupError, Unavailable
from services.preprocessing.memory import mapped, sealed
from services.preprocessing.workers.inflight import InFlight, Share
from services.preprocessing.workers.jobs import Job
from services.preprocessing.workers.limits import Limits
from services.preprocessing.workers.process import Fault, WorkerFault, WorkerProcess
from services.preprocessing.workers.protocol import Facts, Kind

T = TypeVar("T")
Made: TypeAlias = asyncio.Queue[T | BaseException | None]

# A worker that was told to make the next piece before it sent the last never waits for the event loop.
_GRANTS = 2
# A worker that does not stop so soon is replaced: starting one costs less than waiting for it.
_STOP_S = 0.5
_RESTART_S = 1.0
_REFUSALS = {each.reason: each for each in (InvalidRequest, MediaRejected, MediaDamaged)}

log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class _Run(Generic[T]):
    """A job on its way: how many pieces are done, and for how many seconds more a worker may work on it."""

    job: Job[T]
    share: Share
    left_s: float
    done: int = 0
    made: Made[T] = field(default_factory=asyncio.Queue)


class Pool:
    """`size` workers, started on entering and killed on leaving. Raises StartupError if they cannot be started."""

    def __init__(
        self,
        size: int,
        limits: Limits,
        inflight_bytes: int,
        on_replaced: Callable[[Fault], None],
        entry: str = "services.preprocessing.workers.worker",
    ) -> None:
        """inflight_bytes: of pieces that are made and wait for their readers. entry: the module that workers run."""
        self.size = size
        self._limits = limits
        self.inflight = InFlight(inflight_bytes)
        self._on_replaced = on_replaced
        self._entry = entry
        self._workers: set[WorkerProcess] = set()
        self._missing: set[WorkerProcess] = set()  # those whose successors do not start
        self._idle: asyncio.Queue[WorkerProcess] = asyncio.Queue()
        self.busy = 0  # workers that have a job
        self._waiting: dict[object, int] = {}  # since when, the first first
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        try:
            await asyncio.gather(*(self._background(self._start()) for _ in range(self.size)))
        except BaseException as error:
            await self.__aexit__(None, None, None)
            if isinstance(error, WorkerFault | PeerContract):
                hint = f"`python -c 'import {self._entry}'` may say why"
                raise StartupError(f"workers that decode do not start: {error}; {hint}") from error
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop = None
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)
        for worker in tuple(self._workers):
            await self._end(worker)

    @property
    def able(self) -> bool:
        """Whether there are workers, or none has failed to start: else jobs wait for nobody."""
        return len(self._missing) < self.size

    @property
    def jobs(self) -> int:
        """How many have been asked for and not left."""
        return self.inflight.shares

    @property
    def waiting(self) -> int:
        """How many of these wait for a worker."""
        return len(self._waiting)

    @property
    def oldest_ns(self) -> int | None:
        """Since when the first of them has waited, on the monotonic clock; from any thread."""
        return next(iter(list(self._waiting.values())), None)

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
        Raises MediaRejected if the media cost more than the limits allow, or end their worker.
        """
        async with self._running(job, job.piece_bytes) as pieces:
            yield pieces

    @asynccontextmanager
    async def _running(self, job: Job[T], piece_bytes: int) -> AsyncIterator[AsyncGenerator[T, None]]:
        if self._loop is None:
            raise _stopping()
        run = _Run(job, self.inflight.share(piece_bytes), self._limits.wall_s)
        task = self._background(self._make(run))
        try:
            async with aclosing(_taken(run)) as taken:
                yield taken
        finally:
            task.cancel()
            run.share.close()

    async def _make(self, run: _Run[T]) -> None:
        """The run's pieces, by one worker, or by several in turn where others wait while nobody reads."""
        try:
            while run.done < run.job.pieces:
                await run.share.take()
                async with self._worker(run.job.source.name) as worker:
                    await self._make_some(run, worker)
            run.made.put_nowait(None)
        except asyncio.CancelledError:
            run.made.put_nowait(_stopping())
            raise
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
            elif self._waiting:
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
        data = [mapped(each, run.job.piece_bytes) for each in message.descriptors]
        return run.job.piece(run.done, message.facts, data[0] if data else np.empty(0, np.uint8))

    def _failure(self, facts: Facts) -> Exception:
        """What a worker says has gone wrong."""
        reason, text = facts.text("reason"), facts.text("text")
        if reason == "MEMORY":
            return WorkerFault(Fault.MEMORY, f"it needed more than {self._limits.memory_bytes >> 20} MiB")
        return _REFUSALS[reason](text) if reason in _REFUSALS else PeerContract(f"a worker failed: {text}")

    @asynccontextmanager
    async def _worker(self, name: str) -> AsyncIterator[WorkerProcess]:
        """The next worker that is free, inside. name: of the media that it is for."""
        worker = await self._next_idle()
        fault: Fault | None = None
        self.busy += 1
        try:
            yield worker
        except PeerContract:
            fault = Fault.CONTRACT
            raise
        except WorkerFault as error:
            fault = error.fault
            raise MediaRejected(f"{name} cannot be decoded: {error}") from error
        finally:
            self.busy -= 1
            self._background(self._settle(worker) if fault is None else self._replace(worker, fault))

    async def _next_idle(self) -> WorkerProcess:
        place = object()
        self._waiting[place] = monotonic_ns()
        self.inflight.wake()
        try:
            while not (worker := await self._idle.get()).alive:
                self._background(self._replace(worker, Fault.CRASHED))
        finally:
            del self._waiting[place]
        return worker

    async def _settle(self, worker: WorkerProcess) -> None:
        """Ends what the worker does, if anything, and sets it free."""
        try:
            async with asyncio.timeout(_STOP_S):
                worker.tell(Kind.STOP)
                while (message := await worker.receive()).kind is not Kind.DONE:
                    message.close()
                message.close()
        except TimeoutError:
            await self._replace(worker, Fault.ABANDONED)
        except WorkerFault as error:
            await self._replace(worker, error.fault)
        except PeerContract:
            await self._replace(worker, Fault.CONTRACT)
        else:
            self._idle.put_nowait(worker)

    async def _replace(self, worker: WorkerProcess, fault: Fault) -> None:
        self._on_replaced(fault)
        log.warning("worker replaced", fault=fault, pid=worker.pid)
        await self._end(worker)
        while not await self._started():
            self._missing.add(worker)
            await asyncio.sleep(_RESTART_S)
        self._missing.discard(worker)

    async def _started(self) -> bool:
        """Whether a worker more could be started."""
        try:
            await self._start()
        except (WorkerFault, PeerContract, OSError) as error:
            log.error("worker does not start", error=str(error))
            return False
        return True

    async def _start(self) -> None:
        worker = WorkerProcess(self._entry, self._limits)
        self._workers.add(worker)
        try:
            await worker.ready()
        except (WorkerFault, PeerContract):
            await self._end(worker)
            raise
        self._idle.put_nowait(worker)

    async def _end(self, worker: WorkerProcess) -> None:
        await worker.end()
        self._workers.discard(worker)

    def _background(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


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
