"""Unpruned embeddings by content: each made once for all who ask at the same time, and kept for whoever asks later.

    join ─▶ nobody has it  ─▶ lead: room, then a stream selects it ─▶ slices ─▶ complete ─▶ gathered by all ─▶ kept
            being made     ─▶ wait; lead, if its stream is lost ──────────────▲                              │
            kept           ─▶ gathered at once ◀─────────────────────────────────────────────────────────────┘

An entry belongs to those who wait for it: the last to leave ends its pass. Kept ones that nobody reads give way, least
recently read first; nobody ever waits for that, so what is kept can hold nobody up. It knows no gRPC and no prompts.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

from common.byte_semaphore import ByteSemaphore
from common.contract.plan import MediaPlan
from common.telemetry.logs import add_request_stats
from services.encoder.items.batcher import Batcher
from services.encoder.items.cache_key import cache_key
from services.encoder.items.encoding import Encoding
from services.encoder.metrics import EVICTIONS, LOOKUPS
from services.encoder.pruning.methods import SCORES_BYTES, Scores
from services.encoder.tower.tower import Tower


class Source(Protocol):
    """A stream that an entry's slices come from."""

    async def select(self, media_index: int, entry: Entry) -> None: ...

    def brings(self, entry: Entry) -> bool: ...

    def end_if_unwanted(self) -> None: ...


class Entry:
    """One item's unpruned embeddings, their scores by method, and who waits for them.

    source: the stream that its slices come from; None where somebody who waits has yet to lead. kept: it stays when
    the last of them leaves.
    """

    def __init__(self, key: bytes | None, encoding: Encoding) -> None:
        self.key = key
        self.encoding = encoding
        self.scores: dict[str, Scores] = {}
        self.waiters = 0
        self.kept = False
        self.source: Source | None = None

    @property
    def size_bytes(self) -> int:
        return self.encoding.size_bytes + SCORES_BYTES * self.encoding.plan.grid.tokens

    async def lead(self, source: Source, media_index: int) -> None:
        """Has it made from `source`, where it is item `media_index`. Raises what the source has failed by."""
        self.source = source
        try:
            await self.encoding.reserve()
            await source.select(media_index, self)
        except BaseException:
            self.lose(source, None)
            raise
        self.encoding.tell()

    def lose(self, source: Source, error: BaseException | None) -> None:
        """`source` brings no more; error: what is wrong with the media itself, and told to everyone."""
        if self.source is source:
            self.source = None
        if error is not None:
            self.encoding.fail(error)
        self.encoding.tell()


class EmbedsCache:
    """room: for what is being made, and waited for; size_bytes: how much is kept beside it, 0 for nothing."""

    def __init__(self, tower: Tower, batcher: Batcher, room: ByteSemaphore, size_bytes: int) -> None:
        self.tower = tower
        self.room = room
        self.size_bytes = size_bytes
        self.held_bytes = 0
        self.waiters = 0  # requested items that wait for an entry, or read it
        self._batcher = batcher
        self._entries: dict[bytes, Entry] = {}
        self._idle: OrderedDict[Entry, None] = OrderedDict()  # kept ones that nobody reads, least recently read first
        self._idle_bytes = 0

    def join(self, plan: MediaPlan) -> Entry:
        """The item's entry, which the caller waits for until it leaves; where nobody leads, the caller does."""
        key = cache_key(plan, self.tower.dtype, self.tower.embed_levels)
        entry = self._entries.get(key)
        if entry is None or entry.encoding.failure is not None:
            entry = self._entries[key] = Entry(key, self._encoding(plan))
            LOOKUPS.labels("miss").inc()
        elif entry.kept:
            LOOKUPS.labels("hit").inc()
            add_request_stats(cached_media=1)
        else:
            LOOKUPS.labels("shared").inc()
        return self._awaited(entry)

    def alone(self, plan: MediaPlan) -> Entry:
        """An entry for what a prompt brought: a copy makes it, so it is not worth what would give way to it."""
        return self._awaited(Entry(None, self._encoding(plan)))

    def leave(self, entry: Entry) -> None:
        """One who waited has what it wanted, or wants it no more."""
        entry.waiters -= 1
        self.waiters -= 1
        if entry.waiters:
            return
        if entry.kept or self._keep(entry):
            self._idle[entry] = None
            self._idle_bytes += entry.size_bytes
            return
        self._drop(entry)
        if entry.source is not None:
            entry.source.end_if_unwanted()

    def _encoding(self, plan: MediaPlan) -> Encoding:
        return Encoding(plan, self.tower, self._batcher, self.room)

    def _awaited(self, entry: Entry) -> Entry:
        if entry in self._idle:
            del self._idle[entry]
            self._idle_bytes -= entry.size_bytes
        entry.waiters += 1
        self.waiters += 1
        return entry

    def _keep(self, entry: Entry) -> bool:
        """Whether it is kept from now on, others giving way if need be; none do in vain."""
        read_bytes = self.held_bytes - self._idle_bytes
        if entry.key is None or not entry.encoding.complete or read_bytes + entry.size_bytes > self.size_bytes:
            return False
        while self.held_bytes + entry.size_bytes > self.size_bytes:
            oldest, _ = self._idle.popitem(last=False)
            self._idle_bytes -= oldest.size_bytes
            self.held_bytes -= oldest.size_bytes
            self._drop(oldest)
            EVICTIONS.inc()
        entry.kept = True
        self.held_bytes += entry.size_bytes
        entry.encoding.give_room_back()
        return True

    def _drop(self, entry: Entry) -> None:
        if entry.key is not None and self._entries.get(entry.key) is entry:
            del self._entries[entry.key]
        entry.encoding.close()
