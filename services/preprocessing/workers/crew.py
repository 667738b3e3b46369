"""The worker processes of a pool: started, lent to one job at a time, and replaced when something is wrong with one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from time import monotonic_ns
from types import TracebackType
from typing import Self

import structlog

from common.contract.errors import MediaRejected, PeerContract, StartupError
from services.preprocessing.workers.limits import Limits
from services.preprocessing.workers.process import Fault, WorkerFault, WorkerProcess
from services.preprocessing.workers.protocol import Kind

# A worker that does not stop so soon is replaced: starting one costs less than waiting for it.
_STOP_S = 0.5
_RESTART_S = 1.0

log = structlog.get_logger()


class Background:
    """Tasks that nobody waits for, till they are cancelled together."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def cancel(self) -> None:
        """Returns once all have ended, those as well that they start meanwhile."""
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)


class Crew:
    """`size` workers, started on entering and killed on leaving. Raises StartupError if they cannot be started."""

    def __init__(self, size: int, limits: Limits, on_replaced: Callable[[Fault], None], entry: str) -> None:
        """entry: the module that workers run."""
        self.size = size
        self._limits = limits
        self._on_replaced = on_replaced
        self._entry = entry
        self._workers: set[WorkerProcess] = set()
        self._missing: set[WorkerProcess] = set()  # those whose successors do not start
        self._idle: asyncio.Queue[WorkerProcess] = asyncio.Queue()
        self.busy = 0  # workers that are lent
        self._waiting: dict[object, int] = {}  # since when, the first first
        self._background = Background()

    async def __aenter__(self) -> Self:
        try:
            await asyncio.gather(*(self._background.start(self._start()) for _ in range(self.size)))
        except BaseException as error:
            await self.__aexit__(None, None, None)
            if isinstance(error, WorkerFault | PeerContract | OSError):
                hint = f"`python -c 'import {self._entry}'` may say why"
                raise StartupError(f"workers that decode do not start: {error}; {hint}") from error
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._background.cancel()
        for worker in tuple(self._workers):
            await self._end(worker)

    @property
    def able(self) -> bool:
        """Whether there are workers, or none has failed to start: else whoever waits does so for nobody."""
        return len(self._missing) < self.size

    @property
    def waiting(self) -> int:
        """How many wait for a worker."""
        return len(self._waiting)

    @property
    def oldest_ns(self) -> int | None:
        """Since when the first of them has waited, on the monotonic clock; from any thread."""
        return next(iter(list(self._waiting.values())), None)

    @asynccontextmanager
    async def lent(self, name: str, on_waiting: Callable[[], None]) -> AsyncIterator[WorkerProcess]:
        """The next worker that is free, inside. name: of the media that it is for. on_waiting: told that one is wanted.

        Raises MediaRejected for what the worker comes to grief by.
        """
        worker = await self._next_idle(on_waiting)
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
            self._background.start(self._settle(worker) if fault is None else self._replace(worker, fault))

    async def _next_idle(self, on_waiting: Callable[[], None]) -> WorkerProcess:
        place = object()
        self._waiting[place] = monotonic_ns()
        on_waiting()
        try:
            while not (worker := await self._idle.get()).alive:
                self._background.start(self._replace(worker, Fault.CRASHED))
        finally:
            del self._waiting[place]
        return worker

    async def _settle(self, worker: WorkerProcess) -> None:
        """Ends what the worker does, if anything, and sets it free."""
        try:
            async with asyncio.timeout(_STOP_S):
                worker.tell(Kind.STOP)
                while worker.working:
                    (await worker.receive()).close()
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
