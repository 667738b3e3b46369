"""The pruned prompt of one request, gathered from the full layout item by item: ids and M-RoPE positions.

    full:    [text][· · · · · · · ·][text]        N = 13
    kept:          [0     3 4     7]              K = 4 is known before the encoder runs, which ones only after it
    pruned:  [text][0 3 4 7][text]                9 tokens, gathered item by item, or part by part, as `kept` arrives

The runs of a video and of its sound take turns; they are gathered up to the first token of either that is missing:

    full:    [text][a a a][b b][a a a][b b][text]
    arrived:        ─ all of a ─                  up to the first b
             [text][a a a]

It knows plans only, neither requests nor blocks nor models.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from gridsieve.common.contract.errors import PeerContract
from gridsieve.common.contract.plan import Int32Array, MediaPlan, PromptPlan, Run
from gridsieve.common.contract.retention import check_kept

MAX_VOCABULARY = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Span:
    """Kept rows [first_row, first_row + length) of one media item, at `offset` of the pruned prompt."""

    offset: int
    length: int
    media_index: int
    first_row: int

    @property
    def end(self) -> int:
        return self.offset + self.length


@dataclass(slots=True)
class _Arrived:
    """What has arrived of a media item.

    starts: the token of its grid at which each run begins. offsets: the tokens of the prompt at which they begin.
    tokens: of its grid, from the first on, about which `kept` decides; rows: those that are kept. gathered_tokens,
    gathered_rows: of these, those that are gathered already. waiting: the kept tokens that are not.
    """

    runs: Sequence[Run]
    starts: list[int]
    offsets: list[int]
    tokens: int = 0
    rows: int = 0
    gathered_tokens: int = 0
    gathered_rows: int = 0
    waiting: list[Int32Array] = field(default_factory=list)
    encoded_id: int = 0

    def runs_of(self, first: int, end: int) -> slice:
        """The runs that hold tokens [first, end) of the grid."""
        return slice(bisect_right(self.starts, first) - 1, bisect_left(self.starts, end))

    def tokens_before(self, limit: int) -> int:
        """How many tokens of the grid are before a token of the prompt."""
        which = bisect_left(self.offsets, limit) - 1
        return 0 if which < 0 else self.starts[which] + min(self.runs[which].length, limit - self.offsets[which])

    def full_indices(self, first: int, end: int) -> NDArray[np.intp]:
        """Where tokens [first, end) of the grid are in the full layout; there is at least one."""
        which = self.runs_of(first, end)
        ranges = [
            np.arange(run.offset + max(0, first - start), run.offset + min(run.length, end - start))
            for run, start in zip(self.runs[which], self.starts[which], strict=True)
        ]
        return np.concatenate(ranges)


class PrunedPrompt:
    """The pruned prompt: token ids and M-RoPE positions, gathered from the full layout as `kept` arrives.

    plan: the full layout. num_kept: how many tokens of each of its media items are kept.
    tokens: length of the pruned prompt; the grids and rates determine it before any item arrives. An item whose number
        of tokens a threshold decides has a bound in both, until it arrives.
    ids: int32 [tokens or more]; positions: int32 [3, tokens or more]; both valid up to `ready`.
    ready: tokens gathered so far: those before the first token of an item that is missing.
    delta: decoded token i has position tokens + i + delta on all three axes.
    spans: the media rows within [0, ready), in order.
    identities: int64 [2, tokens or more], valid up to `ready`: (0, token id) or (id of encoded media, token of
        the item's grid).
    """

    def __init__(
        self,
        plan: PromptPlan,
        num_kept: Sequence[int],
        vocab_size: int = MAX_VOCABULARY,
        *,
        bounded: Sequence[bool] = (),
    ) -> None:
        """vocab_size: ids from this on name vectors that the model stores, not text.

        bounded: whether num_kept is a bound, for each item; by default none is.
        """
        self.plan = plan
        self.vocab_size = vocab_size
        self.num_kept = list(num_kept)
        self._most_kept = tuple(num_kept)
        self._bounded = tuple(bounded) or (False,) * len(plan.media)
        self._mask = np.ones(plan.tokens, np.bool_)
        self._arrived = [
            _Arrived(
                item.runs,
                [*accumulate((run.length for run in item.runs[:-1]), initial=0)],
                [run.offset for run in item.runs],
            )
            for item in plan.media
        ]
        self._next_item = 0
        self._cursor = 0
        self.tokens = plan.tokens - sum(item.grid.tokens for item in plan.media) + sum(self.num_kept)
        self._next_position = int(plan.positions.max()) + 1
        self.ids = np.empty(self.tokens, np.int32)
        self.positions = np.empty((3, self.tokens), np.int32)
        self.identities = np.empty((2, self.tokens), np.int64)
        self.ready = 0
        self.spans: list[Span] = []
        self._gather()

    def undelivered(self) -> PrunedPrompt:
        """The state of the same prompt before any item arrived."""
        return PrunedPrompt(self.plan, self._most_kept, self.vocab_size, bounded=self._bounded)

    @property
    def delta(self) -> int:
        return self._next_position - self.tokens

    @property
    def early(self) -> int:
        """How many of the tokens that have arrived may be computed before the prompt is complete.

        The last token is computed once it is known to be the last, because its output is sampled. Where a prompt ends
        with media, the token that arrived last is that one if no later one is kept.
        """
        media = self.plan.media
        ends_with_media = bool(media) and media[-1].runs[-1].end == self.plan.tokens
        return self.ready - 1 if ends_with_media else self.ready

    @property
    def complete(self) -> bool:
        return self.ready == self.tokens

    def missing(self, media_index: int) -> bool:
        """Whether an item, or a part of it, has not arrived."""
        return self._arrived[media_index].tokens < self.plan.media[media_index].grid.tokens

    def deliver(
        self, media_index: int, kept: Int32Array | None, encoded_id: int, grid_tokens: int | None = None
    ) -> None:
        """Gathers an item, or its first parts. kept: int32 [K], strictly increasing tokens of its grid; None for all.

        encoded_id: id of the encoded media of what has come since the last delivery, above 0.
        grid_tokens: `kept` decides about so many of the grid's tokens, and continues what was delivered before; None:
            about all.
        Raises PeerContract for an item that does not exist or was delivered before, or if `kept` contradicts the plan.
        """
        if not 0 <= media_index < len(self._arrived) or not self.missing(media_index):
            raise PeerContract(f"item {media_index} of {len(self._arrived)} does not exist or was delivered twice")
        grid, count, item = self.plan.media[media_index].grid, self.num_kept[media_index], self._arrived[media_index]
        first, end = item.tokens, grid.tokens if grid_tokens is None else grid_tokens
        added = np.arange(item.rows, end, dtype=np.int32) if kept is None else kept[item.rows :]
        if end == grid.tokens:
            least = 0 if item.rows else 1
            check_kept(added, grid, count - item.rows, least if self._bounded[media_index] else None)
            self.num_kept[media_index] = item.rows + added.size
            self.tokens -= count - self.num_kept[media_index]
        else:
            check_kept(added, grid, min(count, end) - item.rows, least=0)
        if not first < end <= grid.tokens or (added.size and (added[0] < first or added[-1] >= end)):
            raise PeerContract(f"a part of media item {media_index} keeps tokens outside of [{first}, {end})")
        at = item.full_indices(first, end)
        self._mask[at] = False
        self._mask[at[added - first]] = True
        item.waiting.append(added)
        item.tokens, item.rows, item.encoded_id = end, item.rows + added.size, encoded_id
        self._gather()

    @cached_property
    def text_ids(self) -> Int32Array:
        """int32 [tokens]: ids of the complete prompt, −1 for media rows and for stored vectors."""
        assert self.complete
        ids = self.ids[: self.tokens]
        return np.where((self.identities[0, : self.tokens] > 0) | (ids >= self.vocab_size), np.int32(-1), ids)

    def kept_tokens(self) -> dict[int, Int32Array]:
        """By media index, the kept tokens of the item's grid that are gathered, int32 [K]."""
        found: dict[int, list[NDArray[np.int64]]] = {index: [] for index in range(len(self.plan.media))}
        for span in self.spans:
            found[span.media_index].append(self.identities[1, span.offset : span.end])
        return {index: np.concatenate([*rows, []]).astype(np.int32) for index, rows in found.items()}

    def content(self, first: int, end: int) -> bytes:
        """Everything that keys and values of tokens [first, end) depend on besides the tokens before them."""
        return self.identities[:, first:end].tobytes() + self.positions[:, first:end].tobytes()

    def rows_end(self, media_index: int, rows: int) -> int:
        """The token after the first `rows` rows of a delivered item; 0 if rows is 0.

        More than all tokens, if not all of these rows are gathered: those of another item are missing between them.
        """
        if rows > self._arrived[media_index].gathered_rows:
            return self.tokens + 1
        spans = [span for span in self.spans if span.media_index == media_index and span.first_row < rows]
        return spans[-1].offset + min(rows - spans[-1].first_row, spans[-1].length) if spans else 0

    def _gather(self) -> None:
        """Gathers up to the first token that is missing, or to the end of the prompt."""
        media, limit = self.plan.media, self.plan.tokens
        reached = range(self._next_item, self._next_item)  # items that begin before the limit
        for index in range(self._next_item, len(media)):
            arrived = self._arrived[index]
            if arrived.offsets[0] > limit:
                break
            reached = range(self._next_item, index + 1)
            if self.missing(index):
                limit = min(limit, int(arrived.full_indices(arrived.tokens, arrived.tokens + 1)[0]))
        taken = np.flatnonzero(self._mask[self._cursor : limit]) + self._cursor
        end = self.ready + taken.size
        self.ids[self.ready : end] = self.plan.input_ids[taken]
        self.positions[:, self.ready : end] = self.plan.positions[:, taken]
        self.identities[0, self.ready : end] = 0
        self.identities[1, self.ready : end] = self.ids[self.ready : end]
        spans = [span for index in reached for span in self._new_spans(index, taken, limit)]
        self.spans += sorted(spans, key=attrgetter("offset"))
        self._cursor, self.ready = limit, end
        while self._next_item < len(media) and not self.missing(self._next_item):
            if self._arrived[self._next_item].gathered_tokens < media[self._next_item].grid.tokens:
                break
            self._next_item += 1

    def _new_spans(self, index: int, taken: NDArray[np.intp], limit: int) -> Iterator[Span]:
        """The rows of an item among the tokens that are taken, which are before `limit`."""
        item = self._arrived[index]
        until = min(item.tokens, item.tokens_before(limit))
        if until <= item.gathered_tokens:
            return
        kept = np.concatenate(item.waiting)
        for run in item.runs[item.runs_of(item.gathered_tokens, until)]:
            start, end = np.searchsorted(taken, (run.offset, run.end))
            if end > start:
                span = Span(self.ready + int(start), int(end - start), index, item.gathered_rows)
                self.identities[0, span.offset : span.end] = item.encoded_id
                self.identities[1, span.offset : span.end] = kept[: span.length]
                yield span
                kept = kept[span.length :]
                item.gathered_rows += span.length
        item.gathered_tokens = until
        item.waiting = [kept]


def full_indices(item: MediaPlan) -> NDArray[np.intp]:
    """Where the tokens of an item are in the full layout, in grid order: [t · h · w]."""
    return np.concatenate([np.arange(run.offset, run.end) for run in item.runs])
