"""The pruned prompt of one request, gathered from the full layout item by item: ids and M-RoPE positions.

    full:    [text][· · · · · · · ·][text]        N = 13
    kept:          [0     3 4     7]              K = 4 is known before the encoder runs, which ones only after it
    pruned:  [text][0 3 4 7][text]                9 tokens, gathered item by item, or part by part, as `kept` arrives

It knows plans only, neither requests nor blocks nor models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from framesieve.common.contract.errors import PeerContract
from framesieve.common.contract.plan import Int32Array, MediaPlan, PromptPlan
from framesieve.common.contract.retention import check_kept

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


class PrunedPrompt:
    """The pruned prompt: token ids and M-RoPE positions, gathered from the full layout as `kept` arrives.

    plan: the full layout. num_kept: how many tokens of each of its media items are kept.
    tokens: length of the pruned prompt; the grids and rates determine it before any item arrives. An item whose number
        of tokens a threshold decides has a bound in both, until it arrives.
    ids: int32 [tokens or more]; positions: int32 [3, tokens or more]; both valid up to `ready`.
    ready: tokens gathered so far: those before the first token of an item that has not arrived.
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
        self._kept: list[Int32Array | None] = [None] * len(plan.media)
        self._arrived = [0] * len(plan.media)  # tokens of each grid, from the first on, about which `kept` decides
        self._rows = [0] * len(plan.media)  # of each item, gathered so far
        self._encoded_ids = [0] * len(plan.media)
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
        return self._arrived[media_index] < self.plan.media[media_index].grid.tokens

    def deliver(
        self, media_index: int, kept: Int32Array | None, encoded_id: int, grid_tokens: int | None = None
    ) -> None:
        """Gathers an item, or its first parts. kept: int32 [K], strictly increasing tokens of its grid; None for all.

        encoded_id: id of the encoded media of what has come since the last delivery, above 0.
        grid_tokens: `kept` decides about so many of the grid's tokens, and continues what was delivered before; None:
            about all.
        Raises PeerContract for an item that does not exist or was delivered before, or if `kept` contradicts the plan.
        """
        if not 0 <= media_index < len(self._kept) or not self.missing(media_index):
            raise PeerContract(f"media item {media_index} of {len(self._kept)} does not exist or was delivered twice")
        item, count, before = self.plan.media[media_index], self.num_kept[media_index], self._kept[media_index]
        end = item.grid.tokens if grid_tokens is None else grid_tokens
        if kept is None:
            kept = np.arange(end, dtype=np.int32)
        first, begun = self._arrived[media_index], 0 if before is None else before.size
        if end == item.grid.tokens:
            check_kept(kept, item.grid, count, 1 if self._bounded[media_index] else None)
            self.num_kept[media_index] = kept.size
            self.tokens -= count - kept.size
        elif kept.size:
            check_kept(kept, item.grid, min(count, end), least=1)
        added = kept[begun:]
        if not first < end <= item.grid.tokens or (added.size and (added[0] < first or added[-1] >= end)):
            raise PeerContract(f"a part of media item {media_index} keeps tokens outside of [{first}, {end})")
        at = full_indices(item)
        self._mask[at[first:end]] = False
        self._mask[at[added]] = True
        self._kept[media_index], self._arrived[media_index] = kept, end
        self._encoded_ids[media_index] = encoded_id
        self._gather()

    @cached_property
    def text_ids(self) -> Int32Array:
        """int32 [tokens]: ids of the complete prompt, −1 for media rows and for stored vectors."""
        assert self.complete
        ids = self.ids[: self.tokens]
        return np.where((self.identities[0, : self.tokens] > 0) | (ids >= self.vocab_size), np.int32(-1), ids)

    def content(self, first: int, end: int) -> bytes:
        """Everything that keys and values of tokens [first, end) depend on besides the tokens before them."""
        return self.identities[:, first:end].tobytes() + self.positions[:, first:end].tobytes()

    def rows_end(self, media_index: int, rows: int) -> int:
        """The token after the first `rows` rows of a delivered item; 0 if rows is 0."""
        spans = [span for span in self.spans if span.media_index == media_index and span.first_row < rows]
        return spans[-1].offset + min(rows - spans[-1].first_row, spans[-1].length) if spans else 0

    def _gather(self) -> None:
        """Gathers up to the first token of an item that has not arrived, or to the end of the prompt."""
        media = self.plan.media
        first = self._next_item
        while self._next_item < len(media) and not self.missing(self._next_item):
            self._next_item += 1
        limit = self.plan.tokens
        if self._next_item < len(media):
            limit = _place(media[self._next_item], self._arrived[self._next_item])
        taken = np.flatnonzero(self._mask[self._cursor : limit]) + self._cursor
        end = self.ready + taken.size
        self.ids[self.ready : end] = self.plan.input_ids[taken]
        self.positions[:, self.ready : end] = self.plan.positions[:, taken]
        self.identities[0, self.ready : end] = 0
        self.identities[1, self.ready : end] = self.ids[self.ready : end]
        for index in range(first, min(self._next_item + 1, len(media))):
            self._add_spans(index, taken)
        self._cursor, self.ready = limit, end

    def _add_spans(self, index: int, taken: NDArray[np.intp]) -> None:
        kept = self._kept[index]
        if kept is None:
            return
        for run in self.plan.media[index].runs:
            start, end = np.searchsorted(taken, (run.offset, run.end))
            if end > start:
                row = self._rows[index]
                span = Span(self.ready + int(start), int(end - start), index, row)
                self.identities[0, span.offset : span.end] = self._encoded_ids[index]
                self.identities[1, span.offset : span.end] = kept[row : row + span.length]
                self.spans.append(span)
                self._rows[index] += span.length


def _place(item: MediaPlan, token: int) -> int:
    """Where a token of an item's grid is in the full layout."""
    for run in item.runs:
        if token < run.length:
            return run.offset + token
        token -= run.length
    raise AssertionError("the grid has more tokens than the item's runs")


def full_indices(item: MediaPlan) -> NDArray[np.intp]:
    """Where the tokens of an item are in the full layout, in grid order: [t · h · w]."""
    return np.concatenate([np.arange(run.offset, run.end) for run in item.runs])
