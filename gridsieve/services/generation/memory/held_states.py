"""The slots of recurrent states that one request holds, of models that have any.

    tokens     0 ........ computed ....... known end ... end of the chunk
    slots                 current          next[0]       next[-1]

A step reads `current` and writes `next`, so a step that failed is computed again from the same state.
"""

from __future__ import annotations

from collections.abc import Container

from gridsieve.services.generation.memory.state_slots import NO_STATE, StateSlots


class HeldStates:
    """current: after the computed tokens. pinned: after the pinned blocks.

    Lists of (tokens, slot): `next` are written by the current step, in order, the last one after all of its tokens;
    `saved` become snapshots once the blocks before them are cached.
    """

    def __init__(self) -> None:
        self.current = self.pinned = NO_STATE
        self.next: list[tuple[int, int]] = []
        self.saved: list[tuple[int, int]] = []

    @property
    def slots(self) -> list[int]:
        """Each slot as often as the request holds it."""
        return [self.current, self.pinned, *(slot for _, slot in (*self.next, *self.saved))]

    def begin_at(self, slots: StateSlots, slot: int) -> None:
        """Continues from another state."""
        before, self.current = self.current, slots.incref(slot)
        slots.decref(before)

    def write(self, slots: StateSlots, tokens: int) -> None:
        """Takes a slot that the current step writes after so many tokens."""
        self.next.append((tokens, slots.allocate()))
        self.next.sort()

    def shorten(self, slots: StateSlots, tokens: int) -> None:
        """The current step ends after fewer tokens."""
        *saves, (_, last) = self.next
        self.next = [*(each for each in saves if each[0] < tokens), (tokens, last)]
        drop(slots, [each for each in saves if each[0] >= tokens])

    def take(self, slots: StateSlots, tokens: int, places: Container[int]) -> bool:
        """Continues from the state that the current step has written after so many tokens. False if there is none.

        places: tokens after which a state that was written is saved.
        """
        slot = dict(self.next).get(tokens)
        if slot is None:
            return False
        written = [each for each in self.next if each[0] <= tokens]
        self.saved += [(place, slots.incref(each)) for place, each in written if place in places]
        self.begin_at(slots, slot)
        del self.next[: len(written)]
        drop(slots, written)
        return True

    def release(self, slots: StateSlots) -> None:
        """Drops all states but the pinned one, and continues from the pinned one."""
        drop(slots, self.next)
        drop(slots, self.saved)
        self.begin_at(slots, self.pinned)


def drop(slots: StateSlots, states: list[tuple[int, int]]) -> None:
    """Gives the slots of these states back, and empties the list."""
    for _, slot in states:
        slots.decref(slot)
    states.clear()
