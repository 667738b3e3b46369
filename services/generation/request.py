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
from time import monotonic_ns
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from common.errors import FramesieveError, PeerContract
from common.plan import Int32Array, MediaPlan, PromptPlan
from services.generation.answers import Answer
from services.generation.blocks import ROOT

if TYPE_CHECKING:  # the scheduler imports this module and does not know torch
    from torch import Tensor

    from services.generation.adapters import Adapter
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
    NEW = "new"
    FOLLOWING = "following"
    AWAITING_MEDIA = "awaiting media"
    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"


TRANSITIONS = {
    Status.NEW: {Status.FOLLOWING, Status.AWAITING_MEDIA, Status.WAITING},
    Status.FOLLOWING: {Status.WAITING, Status.DONE},  # until the request that it shares a prompt with has prefilled it
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
    identities: int64 [2, tokens], valid up to `ready`: 0 and a text token's id, or an answer's id and a media row.
    """

    def __init__(self, plan: PromptPlan, kept_counts: Sequence[int]) -> None:
        self._plan = plan
        self._kept_counts = tuple(kept_counts)
        self._mask = np.ones(plan.tokens, np.bool_)
        self._kept: list[Int32Array | None] = [None] * len(plan.media)
        self._answer_ids = [0] * len(plan.media)
        self._next_item = 0
        self._cursor = 0
        dropped = sum(item.grid.tokens for item in plan.media) - sum(self._kept_counts)
        self.tokens = plan.tokens - dropped
        self.delta = int(plan.positions.max()) + 1 - self.tokens
        self.ids = np.empty(self.tokens, np.int32)
        self.positions = np.empty((3, self.tokens), np.int32)
        self.identities = np.empty((2, self.tokens), np.int64)
        self.ready = 0
        self.spans: list[Span] = []
        self._gather()

    @property
    def complete(self) -> bool:
        return self.ready == self.tokens

    def deliver(self, media_index: int, kept: Int32Array | None, answer_id: int) -> None:
        """Takes which tokens of an item's grid were kept: int32 [K], strictly increasing; None for all of them.

        answer_id: above 0; names what the encoder answered.
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
        self._answer_ids[media_index] = answer_id
        self._gather()

    def content(self, first: int, end: int) -> bytes:
        """What the keys and values of tokens [first, end) depend on, besides the tokens before them."""
        return self.identities[:, first:end].tobytes() + self.positions[:, first:end].tobytes()

    def rows_end(self, media_index: int, rows: int) -> int:
        """Where the first `rows` rows of an item that was delivered end; 0 for none."""
        spans = [span for span in self.spans if span.media_index == media_index and span.first_row < rows]
        return spans[-1].offset + min(rows - spans[-1].first_row, spans[-1].length) if spans else 0

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
        self.identities[0, self.ready : end] = 0
        self.identities[1, self.ready : end] = self.ids[self.ready : end]
        for index in range(first, self._next_item):
            self._add_spans(index, taken)
        self._cursor, self.ready = limit, end

    def _add_spans(self, index: int, taken: NDArray[np.intp]) -> None:
        row = 0
        for run in self._plan.media[index].runs:
            start, end = np.searchsorted(taken, (run.offset, run.end))
            if end > start:
                span = Span(self.ready + int(start), int(end - start), index, row)
                self.identities[0, span.offset : span.end] = self._answer_ids[index]
                self.identities[1, span.offset : span.end] = np.arange(row, row + span.length)
                self.spans.append(span)
                row += span.length


class Request:
    """One question and its answer. After `Engine.submit`, the engine's thread alone touches it.

    kept_counts: how many tokens of each media item of the plan are kept.
    answer_keys: what the encoder's answer about each media item is remembered by.
    on_event: called in the engine's thread, in order; `Finished` or `Failed` comes last. It must not block.
    rope: of another request for the same prompt.
    adapter: what the model computes its tokens with; None: the model alone.
    """

    def __init__(
        self,
        id: str,  # noqa: A002
        plan: PromptPlan,
        kept_counts: Sequence[int],
        answer_keys: Sequence[bytes],
        sampling: SamplingParams,
        detokeniser: Detokeniser,
        on_event: Callable[[Event], None],
        rope: RopeState | None = None,
        adapter: Adapter | None = None,
    ) -> None:
        self.id = id
        self.adapter = adapter
        self.plan = plan
        self.kept_counts = tuple(kept_counts)
        self.answer_keys = tuple(answer_keys)
        self.rope = rope or RopeState(plan, kept_counts)
        self.sampling = sampling
        self.detokeniser = detokeniser
        self.on_event = on_event
        self.sampling_state: SamplingState | None = None
        # What is held of each item's embeddings, [1 + levels, R, D]: its last R rows, where the cache has the others.
        self.embeds: list[Tensor | None] = [None] * len(plan.media)
        self.answers: list[Answer | None] = [None] * len(plan.media)
        self.followers: list[Request] = []
        self.output_ids: list[int] = []
        self.guesses: tuple[int, ...] = ()  # tokens that may follow, of the window that is due
        self.status = Status.NEW
        self.since_ns = 0  # when it got its status, on the monotonic clock
        self.arrival = -1  # the engine numbers requests as they come
        self.blocks: list[int] = []
        self.pinned = 0  # of its first blocks: media rows in them are in the cache alone, so it never lets go of them
        self.computed = 0  # tokens whose keys and values are in the cache
        self.chained = 0  # of its first blocks, which are remembered; `chain` is the last one's serial
        self.chain = self.root
        self.cached_tokens = 0  # of the prompt, which others had computed
        self.reclaimed = False  # its blocks were taken before it had ended
        self.prefill_announced = False

    def __repr__(self) -> str:
        return f"Request({self.id}, {self.status.value}, {self.computed}/{self.tokens} computed)"

    @property
    def root(self) -> int:
        """What its first block stands behind in the cache: no adapter reads what another computed."""
        return self.adapter.root if self.adapter else ROOT

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

    @property
    def wanted_media(self) -> tuple[int, ...]:
        """The items whose embeddings have yet to come."""
        return tuple(index for index, answer in enumerate(self.answers) if answer is None)

    def add_follower(
        self,
        id: str,  # noqa: A002
        sampling: SamplingParams,
        detokeniser: Detokeniser,
        on_event: Callable[[Event], None],
    ) -> Request:
        """Another answer to the same prompt, which is computed once: its own starts when this one's has begun."""
        follower = Request(
            id, self.plan, self.kept_counts, self.answer_keys, sampling, detokeniser, on_event, self.rope, self.adapter
        )
        self.followers.append(follower)
        return follower

    def take(self, media_index: int, answer: Answer, embeds: Tensor) -> None:
        """Takes one media item. Raises PeerContract for an answer that does not fit the plan."""
        self.rope.deliver(media_index, answer.kept, answer.id)
        self.answers[media_index] = answer
        self.embeds[media_index] = embeds

    def share_prompt(self, other: Request) -> None:
        """Takes over the complete prompt of another request for the same."""
        self.rope, self.answers, self.embeds = other.rope, other.answers, other.embeds

    def content(self, first: int, end: int) -> bytes:
        """`RopeState.content`, for tokens of prompt and answer."""
        prompt = self.rope.tokens
        if end <= prompt:
            return self.rope.content(first, end)
        own = max(first, prompt)
        ids = self.output_ids[own - prompt : end - prompt]
        positions = np.arange(own, end, dtype=np.int32) + np.int32(self.rope.delta)
        identities = np.concatenate([self.rope.identities[:, first:own], [[0] * len(ids), ids]], axis=1)
        both = np.concatenate([self.rope.positions[:, first:own], np.broadcast_to(positions, (3, end - own))], axis=1)
        return identities.tobytes() + both.tobytes()

    def answers_within(self, first: int, end: int) -> tuple[Answer, ...]:
        """Those whose media rows are among tokens [first, end)."""
        ids = set(self.rope.identities[0, first:end].tolist()) - {0}
        return tuple(answer for answer in self.answers if answer and answer.id in ids) if ids else ()

    def move_to(self, status: Status) -> None:
        assert status in TRANSITIONS[self.status], f"{self} cannot become {status.value}"
        self.status = status
        self.since_ns = monotonic_ns()


def _full_indices(item: MediaPlan) -> NDArray[np.intp]:
    return np.concatenate([np.arange(run.offset, run.end) for run in item.runs])
