"""One request as the engine sees it: its pruned prompt, its answer so far, and what it holds.

It knows neither the scheduler nor the model; tensors and samplers pass through it untouched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from time import monotonic_ns
from typing import TypeAlias

import numpy as np
from torch import Tensor

from common.contract.errors import FramesieveError
from common.contract.plan import PromptPlan
from services.generation.request.adapter import ROOT, Adapter
from services.generation.request.encoded_media import Answer
from services.generation.request.rope import RopeState
from services.generation.sampling.detokenizer import Detokeniser
from services.generation.sampling.sampler import SamplingParams, SamplingState


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


class Request:
    """One question and its answer. `Engine.submit` enters it; from then on the engine's thread alone changes it.

    Others read of it what stands still meanwhile: `answers` and `wanted_media` until media are delivered,
    `cached_tokens` once an event has come.

    kept_counts: how many tokens of each media item of the plan are kept.
    answer_keys: what the encoder's answer about each media item is remembered by.
    on_event: called in the engine's thread, in order; `Finished` or `Failed` comes last. It must not block.
    rope: of another request for the same prompt.
    adapter: what the model computes its tokens with; None: the model alone.
    """

    def __init__(
        self,
        id: str,  # noqa: A002  (as it is called everywhere)
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
        # What is held of each item's embeddings, [1 + levels, R, D]: all of them on the model's device, or an earlier
        # answer's last R on the host, where the cache has the others.
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
