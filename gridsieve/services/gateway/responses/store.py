"""Responses that requests may continue or refer to: in this process, bounded in bytes and in time.

    resp_1   asked, answered
      ▲
    resp_2   asked, answered      asked: the request's own input. answered: the response object

A conversation is a chain of them; one whose first response is gone cannot be continued. The store belongs to the event
loop; other threads may read.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

STORE_BYTES = 2**28
"""Of all callers; beyond it, the responses that were not continued for the longest time go."""
RESPONSE_BYTES = 2**26
"""Of one: a larger one is not stored."""
STORED_S = 3600.0
"""Since it was answered, or the last stored response that continues it."""
CONVERSATION_BYTES = STORE_BYTES - RESPONSE_BYTES
"""Of those that a request continues: with the next response, it has room in the store."""
_ENTRY_BYTES = 1024
"""Of a response beside its texts, rounded up."""


@dataclass(frozen=True, slots=True)
class Stored:
    """owner: of uploads, too. previous: the id of the response that it continues. asked, answered: JSON."""

    owner: str
    previous: str | None
    asked: bytes
    answered: bytes

    @property
    def size_bytes(self) -> int:
        return _ENTRY_BYTES + len(self.asked) + len(self.answered)


class ResponseStore:
    def __init__(self) -> None:
        self._stored: OrderedDict[str, tuple[float, Stored]] = OrderedDict()  # with its end, those that end first first
        self._held_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def find(self, response_id: str, owner: str) -> Stored | None:
        """The response of this id, if it is this owner's."""
        _, found = self._stored.get(response_id, (0.0, None))
        return found if found and found.owner == owner else None

    def conversation(self, response_id: str, owner: str) -> list[tuple[str, Stored]] | None:
        """The responses, with their ids, up to the one of this id; None where one of them is not stored."""
        found: list[tuple[str, Stored]] = []
        following: str | None = response_id
        while following is not None:
            if (each := self.find(following, owner)) is None:
                return None
            found.append((following, each))
            following = each.previous
        return found[::-1]

    def keep(self, response_id: str, stored: Stored) -> bool:
        """Stores a response, and those before it for as long. False: it is too large, or one before it is gone."""
        before = self.conversation(stored.previous, stored.owner) if stored.previous else []
        if before is None or stored.size_bytes > RESPONSE_BYTES:
            return False
        until_s = asyncio.get_running_loop().time() + STORED_S
        for each_id, each in (*before, (response_id, stored)):
            self._stored[each_id] = (until_s, each)
            self._stored.move_to_end(each_id)
        self._held_bytes += stored.size_bytes
        while self._held_bytes > STORE_BYTES:
            self.delete(next(iter(self._stored)))
        if self._timer is None:
            self._expire()
        return True

    def delete(self, response_id: str) -> None:
        _, gone = self._stored.pop(response_id)
        self._held_bytes -= gone.size_bytes

    def _expire(self) -> None:
        """Deletes what has ended, and comes again at the next end."""
        loop = asyncio.get_running_loop()
        for each_id in list(self._ended(loop.time())):
            self.delete(each_id)
        next_s = next((until_s for until_s, _ in self._stored.values()), None)
        self._timer = None if next_s is None else loop.call_at(next_s, self._expire)

    def _ended(self, now_s: float) -> Iterator[str]:
        for each_id, (until_s, _) in self._stored.items():
            if until_s > now_s:
                return
            yield each_id
