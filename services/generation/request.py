"""One request as the engine sees it: its pruned prompt, its answer so far, and what it holds.

It knows neither the scheduler nor the model; tensors and samplers pass through it untouched.

    full:    [text][· · · · · · · ·][text]        N = 13
    kept:          [0     3 4     7]              K = 4, known before the encoder runs; which ones, only after
    pruned:  [text][0 3 4 7][text]                9 tokens, gathered item by item as `kept` arrives
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from common.errors import FramesieveError, PeerContract
from common.plan import Int32Array, MediaPlan, PromptPlan

if TYPE_CHECKING:  # the scheduler imports this module and does not know torch
    from torch import Tensor

    from services.generation.detokenise import Detokeniser
    from services.generation.sampler import SamplingParams, SamplingState


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class PrefillStarted:
    """Everything that the prompt needs is here, and its first forward since then is about to run; sent once."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """More of the answer.

    text: ends at a whole character; may be empty while a stop string may have begun.
    token_ids: since the last event, the one that ended the answer included.
    logprobs: one a token, of raw logits; empty unless asked for.
    top_logprobs: one a token, the likeliest tokens there with theirs; empty unless asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    reason: FinishReason
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Failed:
    error: FramesieveError


Event: TypeAlias = PrefillStarted | Tokens | Finished | Failed


class Status(Enum):
    AWAITING_MEDIA = "awaiting media"
    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"


TRANSITIONS = {
    Status.AWAITING_MEDIA: {Status.WAITING, Status.DONE},
    Status.WAITING: {Status.RUNNING, Status.DONE},
    Status.RUNNING: {Status.WAITING, Status.DONE},  # back to waiting: preempted
    Status.DONE: set(),
}


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


class RopeState:
    """The pruned prompt: token ids and M-RoPE positions, gathered from the full layout as `kept` arrives.

    tokens: of the pruned prompt, known from the grids alone.
    ids: int32 [tokens]; positions: int32 [3, tokens]; both valid up to `ready`.
    ready: tokens gathered so far, which is all that stands before the first item that has not arrived.
    delta: decoded token i sits at tokens + i + delta on all three axes.
    spans: where media rows stand, in order, within [0, ready).
    """

    def __init__(self, plan: PromptPlan, kept_counts: Sequence[int]) -> None:
        self._plan = plan
        self._kept_counts = tuple(kept_counts)
        self._mask = np.ones(plan.tokens, np.bool_)
        self._kept: list[Int32Array | None] = [None] * len(plan.media)
        self._next_item = 0
        self._cursor = 0
        dropped = sum(item.grid.tokens for item in plan.media) - sum(self._kept_counts)
        self.tokens = plan.tokens - dropped
        self.delta = int(plan.positions.max()) + 1 - self.tokens
        self.ids = np.empty(self.tokens, np.int32)
        self.positions = np.empty((3, self.tokens), np.int32)
        self.ready = 0
        self.spans: list[Span] = []
        self._gather()

    @property
    def complete(self) -> bool:
        return self.ready == self.tokens

    def deliver(self, media_index: int, kept: Int32Array | None) -> None:
        """Takes which tokens of an item's grid were kept: int32 [K], strictly increasing; None for all of them.

        Raises PeerContract for an item that does not exist or came before, or for other tokens than the plan allows.
        """
        if not 0 <= media_index < len(self._kept) or self._kept[media_index] is not None:
            raise PeerContract(f"media item {media_index} of {len(self._kept)} does not exist or was delivered twice")
        item, count = self._plan.media[media_index], self._kept_counts[media_index]
        if kept is None:
            kept = np.arange(item.grid.tokens, dtype=np.int32)
        if kept.shape != (count,) or kept[0] < 0 or kept[-1] >= item.grid.tokens or (np.diff(kept) <= 0).any():
            raise PeerContract(f"media item {media_index} of grid {item.grid} must keep {count} tokens in order")
        at = _full_indices(item)
        self._mask[at] = False
        self._mask[at[kept]] = True
        self._kept[media_index] = kept
        self._gather()

    def _gather(self) -> None:
        """Moves on to the first item that has not arrived, or to the prompt's end."""
        media = self._plan.media
        first = self._next_item
        while self._next_item < len(media) and self._kept[self._next_item] is not None:
            self._next_item += 1
        limit = media[self._next_item].runs[0].offset if self._next_item < len(media) else self._plan.tokens
        taken = np.flatnonzero(self._mask[self._cursor : limit]) + self._cursor
        end = self.ready + taken.size
        self.ids[self.ready : end] = self._plan.input_ids[taken]
        self.positions[:, self.ready : end] = self._plan.positions[:, taken]
        for index in range(first, self._next_item):
            self._add_spans(index, taken)
        self._cursor, self.ready = limit, end

    def _add_spans(self, index: int, taken: NDArray[np.intp]) -> None:
        row = 0
        for run in self._plan.media[index].runs:
            start, end = np.searchsorted(taken, (run.offset, run.end))
            if end > start:
                self.spans.append(Span(self.ready + int(start), int(end - start), index, row))
                row += int(end - start)


class Request:
    """One question and its answer. After `Engine.submit`, the engine's thread alone touches it.

    kept_counts: how many tokens of each media item of the plan are kept.
    on_event: called in the engine's thread, in order; `Finished` or `Failed` comes last. It must not block.
    """

    def __init__(
        self,
        id: str,  # noqa: A002
        plan: PromptPlan,
        kept_counts: Sequence[int],
        sampling: SamplingParams,
        detokeniser: Detokeniser,
        on_event: Callable[[Event], None],
    ) -> None:
        self.id = id
        self.kept_counts = tuple(kept_counts)
        self.embed_levels = plan.embed_levels
        self.rope = RopeState(plan, kept_counts)
        self.sampling = sampling
        self.detokeniser = detokeniser
        self.on_event = on_event
        self.sampling_state: SamplingState | None = None
        self.embeds: list[Tensor | None] = [None] * len(plan.media)
        self.output_ids: list[int] = []
        self.status = Status.WAITING if self.rope.complete else Status.AWAITING_MEDIA
        self.arrival = -1  # the engine numbers requests as they come
        self.blocks: list[int] = []
        self.computed = 0  # tokens whose keys and values are in the cache
        self.reclaimed = False  # its blocks were taken while it awaited media
        self.prefill_announced = False

    def __repr__(self) -> str:
        return f"Request({self.id}, {self.status.value}, {self.computed}/{self.tokens} computed)"

    @property
    def tokens(self) -> int:
        """Of the pruned prompt and the answer so far."""
        return self.rope.tokens + len(self.output_ids)

    @property
    def max_tokens(self) -> int:
        """Tokens it may ever need room for: the last token of an answer is never read again."""
        return self.rope.tokens + self.sampling.max_new_tokens - 1

    @property
    def ready_tokens(self) -> int:
        """How many of `tokens` are known by now."""
        return self.rope.ready + len(self.output_ids)

    def move_to(self, status: Status) -> None:
        assert status in TRANSITIONS[self.status], f"{self} cannot become {status.value}"
        self.status = status


def _full_indices(item: MediaPlan) -> NDArray[np.intp]:
    return np.concatenate([np.arange(run.offset, run.end) for run in item.runs])
