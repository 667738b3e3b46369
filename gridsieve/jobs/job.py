"""Runs a job: sends requests, as many at once as the services take, and writes their rows.

    requests:  [done][done][in flight . . . . . .][not yet sent ....]
                           |<---- the window --->|

What can pass is tried again: a refusal for lack of room for as long as it takes, a service that is gone for
`PATIENCE_S`. Everything else is the request's row. It knows neither files nor HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeAlias

from gridsieve.common.byte_semaphore import ByteSemaphore
from gridsieve.common.contract.errors import InvalidRequest, Unauthenticated, Unavailable
from gridsieve.jobs.lines import Line, Reply, Row, row_of, unsent_row
from gridsieve.jobs.requests import Requests

Ask: TypeAlias = Callable[[Line], Awaitable[Reply]]
"""Sends a request. A service that cannot be reached is a reply of status 503."""

PATIENCE_S = 120.0
"""How long a request is tried again while services are gone."""
HELD_BYTES = 2**28
"""Of bodies that are being sent."""
_FIRST, _MOST = 8, 1024
_AHEAD = 1024
_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 15.0
_UNAUTHENTICATED, _OVERLOADED, _GONE = 401, 429, (502, 503)


class Window:
    """How many requests are sent at once.

    It grows by one with each answer, which doubles it in the time of a request, until one is refused for lack of room.
    Then it is what the services had taken, and grows by one in the time of a request.
    Source: slow start and congestion avoidance of TCP, RFC 5681.
    """

    def __init__(self) -> None:
        self.size = float(_FIRST)
        self._is_known = False

    def answered(self) -> None:
        self.size = min(_MOST, self.size + (1 / self.size if self._is_known else 1))

    def refused(self, taken: int) -> None:
        """taken: how many others are in flight."""
        self.size, self._is_known = max(1.0, taken), True


class Job:
    """ordered: rows are written in the order of the requests, otherwise as they are answered. held_bytes: of bodies
    that are being sent. on_row: told of each row, once it is written. on_wait: told why requests wait."""

    def __init__(
        self,
        requests: Requests,
        ask: Ask,
        write: Callable[[Row], None],
        *,
        ordered: bool = False,
        held_bytes: int = HELD_BYTES,
        on_row: Callable[[Row], None] = lambda _: None,
        on_wait: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.window = Window()
        self._requests = requests
        self._ask = ask
        self._write = write
        self._ordered = ordered
        self._bytes = ByteSemaphore(held_bytes)
        self._on_row = on_row
        self._on_wait = on_wait
        self._running = self._pausing = 0
        self._answered_s = float("-inf")
        self._rows: dict[int, Row] = {}  # those that wait for the ones before them
        self._written = 0
        self._changed = asyncio.Event()

    async def run(self, numbers: Iterable[int]) -> None:
        """Asks these requests.

        Raises Unavailable if the services are gone, Unauthenticated if they do not know the caller, and what `write`
        raises. What is not written then, or when it is cancelled, can be asked later.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for place, number in enumerate(numbers):
                    while not self._has_room(place):
                        self._changed.clear()
                        await self._changed.wait()
                    self._running += 1
                    group.create_task(self._one(place, number))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    def _has_room(self, place: int) -> bool:
        return self._running < self.window.size and not (self._ordered and place >= self._written + _AHEAD)

    async def _one(self, place: int, number: int) -> None:
        try:
            self._rows[place] = await self._row(number)
        finally:
            self._running -= 1
            self._changed.set()
        # Where order does not matter, only this one waits.
        while (row := self._rows.pop(self._written if self._ordered else place, None)) is not None:
            self._write(row)
            self._written += 1
            self._on_row(row)

    async def _row(self, number: int) -> Row:
        custom_id = self._requests.ids[number]
        try:
            size_bytes = await asyncio.to_thread(self._requests.size_bytes, number)
            async with self._bytes.reserved(min(size_bytes, self._bytes.size_bytes)):
                line = await asyncio.to_thread(self._requests.line, number)
                return row_of(custom_id, await self._answered(line))
        except InvalidRequest as error:
            return unsent_row(custom_id, error.reason, str(error))
        except OSError as error:
            return unsent_row(custom_id, "FILE", error.strerror or str(error))

    async def _answered(self, line: Line) -> Reply:
        """The reply that is the request's row."""
        clock = asyncio.get_running_loop().time
        gone_since_s, pause_s = None, _PAUSE_S
        while True:
            reply = await self._ask(line)
            if reply.status_code == _UNAUTHENTICATED:
                raise Unauthenticated(reply.message)
            if reply.status_code == _OVERLOADED:
                self.window.refused(self._running - self._pausing - 1)
                wait_s, gone_since_s, pause_s = reply.retry_after_s, None, _PAUSE_S
            elif reply.status_code in _GONE:
                gone_since_s = clock() if gone_since_s is None else gone_since_s
                if clock() - gone_since_s > PATIENCE_S:
                    if self._answered_s > gone_since_s:  # others are answered: the reason is this request
                        return reply
                    raise Unavailable(reply.message, "gateway")
                wait_s, pause_s = pause_s, min(2 * pause_s, _LONGEST_PAUSE_S)
            else:
                self._answered_s = clock()
                self.window.answered()
                return reply
            self._on_wait(reply.message)
            self._pausing += 1
            try:
                await asyncio.sleep(wait_s)
            finally:
                self._pausing -= 1
