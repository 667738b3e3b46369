"""The allocator of the slots of recurrent states: reference counts, and snapshots by the prefix that led to them.

    working slots   one that a sequence has, and the one that its next chunk writes
    snapshots       the states after some prefixes, by the serial of the cached block that ends there

A prefix is found again only where both its blocks and a snapshot at its end are there. The snapshot that was used least
recently is dropped first, when a slot is needed. One whose block was evicted is never found again, since serials are
not used twice, and grows old.

It knows nothing of the cache's tensors.
"""

from __future__ import annotations

from collections.abc import Iterable

# The slot of the recurrent state before the first token.
NO_STATE = 0


class StateSlots:
    """Hands out slots [first, first + total). NO_STATE is the state of no tokens; it is not counted."""

    def __init__(self, total: int, first: int) -> None:
        self.total = total
        # Taken from the end, lowest number first: memory that was never written is not resident on a CPU.
        self._empty = list(range(first + total - 1, first - 1, -1))
        self._references: dict[int, int] = {}
        self._snapshots: dict[int, int] = {}  # slots by serial, least recently used first

    @property
    def free(self) -> int:
        """Slots that no sequence has: empty ones, and those of snapshots alone."""
        return len(self._empty) + sum(self._references[slot] == 1 for slot in self._snapshots.values())

    @property
    def used(self) -> int:
        return self.total - self.free

    @property
    def snapshots(self) -> int:
        return len(self._snapshots)

    def allocate(self) -> int:
        """A slot with one reference. Drops a snapshot if none is empty; one slot must be `free`."""
        if not self._empty:
            self.forget(next(serial for serial, slot in self._snapshots.items() if self._references[slot] == 1))
        slot = self._empty.pop()
        self._references[slot] = 1
        return slot

    def incref(self, slot: int) -> int:
        if slot != NO_STATE:
            self._references[slot] += 1
        return slot

    def decref(self, slot: int) -> None:
        if slot == NO_STATE:
            return
        self._references[slot] -= 1
        if not self._references[slot]:
            del self._references[slot]
            self._empty.append(slot)

    def snapshot(self, serial: int) -> int | None:
        """The slot of the state after the cached block with this serial, which counts as used now."""
        slot = self._snapshots.pop(serial, None)
        if slot is not None:
            self._snapshots[serial] = slot
        return slot

    def keep(self, serial: int, slot: int) -> None:
        """Makes the state after the block with this serial a snapshot, unless there is one."""
        if self.snapshot(serial) is None:
            self._snapshots[serial] = self.incref(slot)

    def forget(self, serial: int) -> None:
        """Drops a snapshot, if it is there."""
        slot = self._snapshots.pop(serial, None)
        if slot is not None:
            self.decref(slot)

    def check_integrity(self, held: Iterable[int]) -> None:
        """Asserts that reference counts match `held`, the slots of all requests, and that no slot is lost."""
        references: dict[int, int] = {}
        for slot in (*held, *self._snapshots.values()):
            if slot != NO_STATE:
                references[slot] = references.get(slot, 0) + 1
        assert references == self._references, "reference counts of states differ from what requests hold"
        assert len(self._empty) + len(self._references) == self.total, "a slot is lost"
        assert not set(self._empty) & self._references.keys(), "an empty slot is held"
