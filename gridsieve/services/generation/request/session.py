"""A live session: a sequence that grows by segments, rests between them with its blocks, and forgets its oldest ones.

    segments   [0, pinned][  1  ][  2   ][ 3 ][   4   ]
    blocks     | p | p | p | a | b | c | d | e | f | g |
    evict 1, 2             └─ a, b, c ─┘                  whole blocks between segment 0 and segment 3
    then       | p | p | p | d | e | f | g | a | b | c |  the rest moves up, and the blocks are filled again

A segment is a slice with the text before it, or a question with its answer. Positions are never renumbered, so nothing
of what stays changes. A segment is computed by a `Request` whose prompt is all rows that are held and then its own; the
request borrows its lease. In between, the session belongs to its call.

It knows neither the scheduler nor the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from gridsieve.common.contract.errors import PromptTooLong
from gridsieve.common.contract.plan import (
    DIGEST_BYTES,
    FrameShape,
    Grid,
    Int32Array,
    MediaPlan,
    Modality,
    PromptPlan,
    Run,
)
from gridsieve.services.generation.memory.lease import Borrowed, Lease
from gridsieve.services.generation.request.pruned_prompt import PrunedPrompt


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Rows to add to a session.

    ids: int32 [n]. positions: int32 [3, n], those of the session. runs: its media rows, of which there are R in all.
    embeds: [1 + embed_levels, R, hidden_size]; None without media rows.
    next_position: of a row of text after it.
    keeps_answer: whether the answer to it stays, too. transient: neither it nor its answer stays.
    """

    ids: Int32Array
    positions: Int32Array
    next_position: int
    runs: tuple[Run, ...] = ()
    embeds: Tensor | None = None
    keeps_answer: bool = False
    transient: bool = False

    def after(self, texts: Sequence[Segment]) -> Segment:
        """Segments without media rows, and it, as one."""
        rows = sum(each.ids.size for each in texts)
        return replace(
            self,
            ids=np.concatenate([*(each.ids for each in texts), self.ids]),
            positions=np.concatenate([*(each.positions for each in texts), self.positions], axis=1),
            runs=tuple(Run(rows + run.offset, run.length) for run in self.runs),
        )


@dataclass(eq=False)
class Session:
    """The rows that a session holds, at rest.

    window_tokens: the most rows that it holds before a segment is computed; the rows of a slice count with them.
    answer_tokens: room beyond the window for a question and its answer.
    lease: its blocks, of which the first ones hold its rows, and the recurrent state after them.
    ids: int32 [held]; positions: int32 [3, held]; numbers: int32 [held], the segment of each row.
    next_position: of the next row of text. count: segments so far.
    first: number of the oldest segment after segment 0 that is held. Segment 0 stays.
    unsaid: the last tokens of the last answer that stayed, which were sampled and whose keys and values were not
    computed.
    """

    id: str
    window_tokens: int
    answer_tokens: int
    block_tokens: int
    lease: Lease = field(init=False)
    ids: Int32Array = field(default_factory=lambda: np.empty(0, np.int32))
    positions: Int32Array = field(default_factory=lambda: np.empty((3, 0), np.int32))
    numbers: Int32Array = field(default_factory=lambda: np.empty(0, np.int32))
    next_position: int = 0
    count: int = 0
    first: int = 1
    unsaid: tuple[int, ...] = ()
    _computing: tuple[Segment, PrunedPrompt] | None = None  # the segment of its request, if it has one

    def __post_init__(self) -> None:
        self.lease = Lease(-(-(self.window_tokens + self.answer_tokens) // self.block_tokens))

    @property
    def held(self) -> int:
        return self.ids.size

    def evict(self, rows: int, before: int) -> int:
        """Evicts the segments below number `before`, and older ones until `rows` more fit into the window.

        Returns how many rows went. Raises PromptTooLong, and evicts nothing, if they do not fit beside the first
        segment.
        """
        start = -(-self._rows_before(1) // self.block_tokens) * self.block_tokens
        gone, oldest = 0, self.first
        while oldest < self.count and (oldest < before or self.held - gone + rows > self.window_tokens):
            oldest += 1
            gone = max(0, self._rows_before(oldest) - start) // self.block_tokens * self.block_tokens
        if self.held - gone + rows > self.window_tokens:
            needed = self.held - gone + rows
            raise PromptTooLong(
                f"a session's first segment and its next {rows} tokens need {needed}, its window has "
                f"{self.window_tokens}",
                value=needed,
                limit=self.window_tokens,
                remedy="raise `window_tokens`, or lower `max_pixels`",
            )
        self.first = oldest
        self.lease.rotate(start // self.block_tokens, (start + gone) // self.block_tokens)
        kept = np.r_[:start, start + gone : self.held] if gone else slice(None)
        self.ids, self.positions, self.numbers = self.ids[kept], self.positions[:, kept], self.numbers[kept]
        return gone

    def begin(self, segment: Segment, embed_levels: int) -> PrunedPrompt:
        """The prompt that computes a segment: the rows that are held, then its own."""
        assert self._computing is None, "the session has a request"
        runs = tuple(Run(self.held + run.offset, run.length) for run in segment.runs)
        rows = sum(run.length for run in runs)
        # All its media rows as one item, of which every token is kept.
        media = (_item(rows, runs),) if rows else ()
        plan = PromptPlan(
            np.concatenate([self.ids, segment.ids]),
            np.concatenate([self.positions, segment.positions], axis=1),
            media,
            embed_levels,
            bytes(DIGEST_BYTES),
        )
        prompt = PrunedPrompt(plan, [rows] if rows else [])
        if rows:
            prompt.deliver(0, None, encoded_id=1)
        self._computing = segment, prompt
        return prompt

    def borrowed(self) -> Borrowed:
        """What the request of the segment holds."""
        return Borrowed(self.lease, self.held, self.end)

    def end(self, computed: int, output_ids: Sequence[int]) -> bool:
        """Takes what stays of the segment whose request has ended, after so many computed tokens.

        Nothing stays if it was not computed as a whole. Returns whether anything stays.
        """
        assert self._computing
        (segment, prompt), self._computing = self._computing, None
        answer = computed - prompt.tokens
        if answer < 0 or segment.transient:
            return False
        said = list(output_ids) if segment.keeps_answer else []
        answer = min(answer, len(said))
        places = np.arange(answer, dtype=np.int32) + np.int32(prompt.tokens + prompt.delta)
        self.ids = np.concatenate([prompt.ids, np.array(said[:answer], np.int32)])
        self.positions = np.concatenate([prompt.positions, np.tile(places, (3, 1))], axis=1)
        self.numbers = np.concatenate([self.numbers, np.full(self.ids.size - self.numbers.size, self.count, np.int32)])
        self.next_position, self.unsaid = segment.next_position + answer, tuple(said[answer:])
        self.count += 1
        return True

    def rows_of(self, number: int) -> int:
        """How many rows it holds of a segment."""
        return self._rows_before(number + 1) - self._rows_before(number)

    def forget(self) -> None:
        """Begins again without rows, at position 0, with the same blocks. The next request begins without a state."""
        empty = Session(self.id, self.window_tokens, self.answer_tokens, self.block_tokens)
        self.ids, self.positions, self.numbers = empty.ids, empty.positions, empty.numbers
        self.next_position, self.count, self.first, self.unsaid = 0, 0, 1, ()

    def _rows_before(self, number: int) -> int:
        """The rows of the segments below a number."""
        return int(np.searchsorted(self.numbers, number))


def _item(rows: int, runs: tuple[Run, ...]) -> MediaPlan:
    return MediaPlan(Modality.IMAGE, Grid(1, 1, rows), runs, FrameShape(), None, (), bytes(DIGEST_BYTES))
