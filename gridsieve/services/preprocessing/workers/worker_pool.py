"""The pool of worker processes: starts them, lends each to one job at a time, and replaces those that fail.

It knows nothing of jobs: `job_queue` decides what a borrowed worker does.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from operator import attrgetter
from time import monotonic_ns
from typing import Self

import structlog

from gridsieve.common.contract.errors import MediaRejected, PeerContract, StartupError
from gridsieve.common.yielding import call_yields, join_line
from gridsieve.services.preprocessing.workers.limits import Limits, Mechanism
from gridsieve.services.preprocessing.workers.process import Fault, WorkerFault, WorkerProcess
from gridsieve.services.preprocessing.workers.protocol import Kind

# A worker that does not confirm STOP within this time is replaced: starting another costs less than waiting longer.
_STOP_S = 0.5
_RESTART_S = 1.0

log = structlog.get_logger()


class BackgroundTasks:
    """Tasks that run on their own until they finish or are cancelled together."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def cancel(self) -> None:
        """Returns once all tasks have ended, including those that they start meanwhile."""
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)


@dataclass(frozen=True, slots=True, eq=False)
class _Wait:
    """Of a job for a worker."""

    lent: asyncio.Future[WorkerProcess]
    yields: bool


class WorkerPool:
    """`size` workers, started on entering and killed on leaving. Entering raises StartupError if one does not start."""

    def __init__(self, size: int, limits: Limits, on_replaced: Callable[[Fault], None], entry: str) -> None:
        """entry: the module whose `main` the workers run."""
        self.size = size
        self._limits = limits
        self._on_replaced = on_replaced
        self._entry = entry
        self._workers: set[WorkerProcess] = set()
        self._missing: set[WorkerProcess] = set()  # ended workers whose replacement does not start
        self._idle: deque[WorkerProcess] = deque()
        self._line: deque[_Wait] = deque()  # empty while workers are idle
        self.busy = 0  # workers that are lent
        self.confined_by = frozenset(map(str, Mechanism))  # what confines every worker
        self._waiting: dict[object, int] = {}  # monotonic start of each wait, the oldest first
        self.pressing: set[object] = set()  # those waits for which others give their worker up
        self._background = BackgroundTasks()

    async def __aenter__(self) -> Self:
        try:
            await asyncio.gather(*(self._background.start(self._start()) for _ in range(self.size)))
        except BaseException as error:
            await self.__aexit__()
            if isinstance(error, WorkerFault | PeerContract | OSError):
                hint = f"`python -c 'import {self._entry}'` may say why"
                raise StartupError(f"decoding workers do not start: {error}; {hint}") from error
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._background.cancel()
        for worker in tuple(self._workers):
            await self._end(worker)

    @property
    def healthy(self) -> bool:
        """False while every worker is gone and none of their replacements starts: no job can be served then."""
        return len(self._missing) < self.size

    @property
    def waiting(self) -> int:
        """Jobs that wait for a worker."""
        return len(self._waiting)

    @property
    def oldest_ns(self) -> int | None:
        """Monotonic time at which the longest waiting job began to wait. May be read from any thread."""
        return next(iter(list(self._waiting.values())), None)

    @asynccontextmanager
    async def borrow(
        self, name: str, on_waiting: Callable[[], None], gives_way: bool = False
    ) -> AsyncIterator[WorkerProcess]:
        """Lends the next idle worker for the length of the block.

        name: of the media, for error texts. on_waiting: called when the wait begins. gives_way: nobody else gives a
        worker up for this wait.
        Raises MediaRejected for a WorkerFault inside the block; the worker is then replaced.
        """
        worker = await self._next_idle(on_waiting, gives_way)
        fault: Fault | None = None
        self.busy += 1
        try:
            yield worker
        except PeerContract:
            fault = Fault.CONTRACT
            raise
        except WorkerFault as error:
            fault = error.fault
            raise MediaRejected(f"cannot be decoded: {error}", field=name) from error
        finally:
            self.busy -= 1
            self._background.start(self._settle(worker) if fault is None else self._replace(worker, fault))

    async def _next_idle(self, on_waiting: Callable[[], None], gives_way: bool) -> WorkerProcess:
        place = object()
        self._waiting[place] = monotonic_ns()
        if not gives_way:
            self.pressing.add(place)
        on_waiting()
        try:
            while not (worker := await self._lent()).alive:
                self._background.start(self._replace(worker, Fault.CRASHED))
        finally:
            del self._waiting[place]
            self.pressing.discard(place)
        return worker

    async def _lent(self) -> WorkerProcess:
        """The next idle worker. Calls that yield wait behind the others."""
        if self._idle:
            return self._idle.popleft()
        wait = _Wait(asyncio.get_running_loop().create_future(), call_yields())
        join_line(self._line, wait, attrgetter("yields"))
        try:
            return await wait.lent
        except asyncio.CancelledError:
            if not wait.lent.cancelled():  # lent and cancelled in the same iteration of the loop
                self._lend(wait.lent.result())
            raise

    def _lend(self, worker: WorkerProcess) -> None:
        """Lends an idle worker to the first that waits."""
        while self._line:
            wait = self._line.popleft()
            if not wait.lent.done():
                wait.lent.set_result(worker)
                return
        self._idle.append(worker)

    async def _settle(self, worker: WorkerProcess) -> None:
        """Stops the worker's job, if it still has one, and marks the worker idle."""
        try:
            async with asyncio.timeout(_STOP_S):
                worker.send(Kind.STOP)
                while worker.working:
                    (await worker.receive()).close()
        except TimeoutError:
            await self._replace(worker, Fault.ABANDONED)
        except WorkerFault as error:
            await self._replace(worker, error.fault)
        except PeerContract:
            await self._replace(worker, Fault.CONTRACT)
        else:
            self._lend(worker)

    async def _replace(self, worker: WorkerProcess, fault: Fault) -> None:
        self._on_replaced(fault)
        log.warning("worker replaced", fault=fault, pid=worker.pid)
        await self._end(worker)
        while True:
            try:
                await self._start()
                break
            except (WorkerFault, PeerContract, StartupError, OSError) as error:
                log.error("worker does not start", error=str(error))
                self._missing.add(worker)
                await asyncio.sleep(_RESTART_S)
        self._missing.discard(worker)

    async def _start(self) -> None:
        worker = WorkerProcess.start(self._entry, self._limits)
        self._workers.add(worker)
        try:
            self.confined_by &= await worker.ready()
        except (WorkerFault, PeerContract, StartupError):
            await self._end(worker)
            raise
        self._lend(worker)

    async def _end(self, worker: WorkerProcess) -> None:
        await worker.end()
        self._workers.discard(worker)
