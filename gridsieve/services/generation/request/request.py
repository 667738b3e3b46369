"""One request as the engine sees it: its pruned prompt, the answer so far, and what it holds in memory.

It knows neither the scheduler nor the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import chain
from time import monotonic_ns
from typing import TypeAlias

import numpy as np
from torch import Tensor

from gridsieve.common.contract.errors import GridsieveError
from gridsieve.common.contract.plan import Int32Array, salted
from gridsieve.services.generation.memory.blocks import ROOT
from gridsieve.services.generation.memory.holding import Holding
from gridsieve.services.generation.request.encoded_media import EncodedMedia, MediaItem
from gridsieve.services.generation.request.pruned_prompt import PrunedPrompt
from gridsieve.services.generation.sampling.detokenizer import Detokenizer
from gridsieve.services.generation.sampling.rows import Float32Array
from gridsieve.services.generation.sampling.sampler import SampledToken, SamplingParams, SamplingState


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter that the model is computed with.

    name: used by requests. digest: sha256 of its config and weights, its identity in the prefix cache.
    in_tower: whether it changes the vision tower or its projector, too, which the encoder computes.
    """

    name: str
    digest: bytes
    in_tower: bool = False


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"


@dataclass(frozen=True, slots=True)
class PrefillStarted:
    """All media have arrived and the first forward since then is about to run. Sent once for each answer."""


@dataclass(frozen=True, slots=True)
class Delta:
    """The next tokens of an answer and their text.

    text: whole characters only; may be empty while a stop string may have begun, and is empty without a detokenizer.
    token_ids: tokens since the last event, including one that ends the answer.
    logprobs: one for each token, of raw logits; empty unless requested.
    top_logprobs: for each token, the most likely tokens and their log-probabilities; empty unless requested.
    ended: whether the last token is an end token, which has no text.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    ended: bool = False

    @classmethod
    def joined(cls, several: Sequence[Delta]) -> Delta:
        """Events of one answer that follow each other, as one."""
        if len(several) == 1:
            return several[0]
        return cls(
            "".join(each.text for each in several),
            tuple(chain.from_iterable(each.token_ids for each in several)),
            tuple(chain.from_iterable(each.logprobs for each in several)),
            tuple(chain.from_iterable(each.top_logprobs for each in several)),
            several[-1].ended,
        )


@dataclass(frozen=True, slots=True)
class Read:
    """values: float32 [W], what was read of the prompt of a `Reader`."""

    values: Float32Array


@dataclass(frozen=True, slots=True, eq=False)
class Attended:
    """What the tokens of an answer attended to: weights of the rows that they were drawn from, on the M media tokens of
    the prompt, as means over heads and over the layers that attend. Those of a row on all tokens before it sum to 1.

    token_ids: the n tokens of the answer. kept: of each media item, the kept tokens of its grid, int32 [K]; M together.
    weights: float32 [M], mean over the n tokens.
    token_shares: float32 [n, items], of each item as a whole.
    token_weights: float32 [n, M]; None where that would be too large.
    """

    token_ids: tuple[int, ...]
    kept: tuple[Int32Array, ...]
    weights: Float32Array
    token_shares: Float32Array
    token_weights: Float32Array | None


@dataclass(frozen=True, slots=True)
class Finished:
    """draft_tokens: those that the model computed for the answer; accepted_draft_tokens: those that are part of it."""

    reason: FinishReason
    completion_tokens: int
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Failed:
    error: GridsieveError


Event: TypeAlias = PrefillStarted | Delta | Read | Attended | Finished | Failed


class Status(Enum):
    NEW = "new"
    AWAITING_SIBLING = "awaiting sibling"  # until the request whose prompt it shares has prefilled that prompt
    AWAITING_MEDIA = "awaiting media"
    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"


TRANSITIONS = {
    Status.NEW: {Status.AWAITING_SIBLING, Status.AWAITING_MEDIA, Status.WAITING},
    Status.AWAITING_SIBLING: {Status.WAITING, Status.DONE},
    Status.AWAITING_MEDIA: {Status.WAITING, Status.DONE},
    Status.WAITING: {Status.RUNNING, Status.DONE},
    Status.RUNNING: {Status.WAITING, Status.DONE},  # back to WAITING by preemption
    Status.DONE: set(),
}


class Request:
    """One prompt and its answer. After `Engine.submit` only the engine's thread changes it.

    Other threads may read `encoded_media` and `wanted_media` until media are delivered, and `cached_tokens` after the
    first event: these do not change meanwhile.

    prompt: shared with its siblings, other answers to the same prompt.
    media_keys: key of each media item in the cache of encoded media.
    on_event: called in the engine's thread, in order; the last event is `Finished` or `Failed`. Must not block.
    detokenizer: finds stop strings; None without any: then the reader of the events makes text of tokens, many at once
        and not in the engine's thread.
    adapter: None to compute with the model alone.
    cache_salt: sequences of other salts share no blocks with it; empty: none.
    holding: what it holds in memory, which `Memory` alone changes; None: nothing yet, and blocks of its own later.
    yields: to requests that do not.
    """

    def __init__(
        self,
        id: str,
        prompt: PrunedPrompt,
        media_keys: Sequence[bytes],
        sampling: SamplingParams,
        detokenizer: Detokenizer | None,
        on_event: Callable[[Event], None],
        adapter: Adapter | None = None,
        cache_salt: str = "",
        holding: Holding | None = None,
        yields: bool = False,
    ) -> None:
        self.id = id
        self.adapter = adapter
        self.cache_salt = cache_salt
        self.prompt = prompt
        self.media_keys = tuple(media_keys)
        self.sampling = sampling
        self.detokenizer = detokenizer
        self.on_event = on_event
        # For each item [1 + embed_levels, R, D] on the host: all its embeddings, or room for those that have not
        # arrived, or, where the KV cache holds the rows before them, `EncodedMedia.last_rows`.
        self.embeds: list[Tensor | None] = [None] * len(self.media_keys)
        self.encoded_media: list[EncodedMedia | None] = [None] * len(self.media_keys)
        self.attending: Request | None = None  # what computes its answer again, once it has it
        self.siblings: list[Request] = []  # other answers to the prompt (`n`) that start once it is prefilled
        self.output_ids: list[int] = []
        self.num_unread = 0  # tokens after `output_ids` that the device samples and the host has not read
        self.status = Status.NEW
        self.since_ns = 0  # when it got its status, on the monotonic clock
        self.yields = yields
        # The order in which requests are served; assigned by the engine: of submission, after those that do not yield.
        self.arrival = (yields, -1)
        self.holding = holding or Holding(_root(adapter, cache_salt))
        self.draft_tokens = self.accepted_draft_tokens = 0
        self.accepted_per_step: float | None = None  # a moving average of the steps in which it had draft tokens
        self.prefill_announced = False

    def __repr__(self) -> str:
        return f"Request({self.id}, {self.status.value}, {self.holding.num_computed_tokens}/{self.tokens} computed)"

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that other requests, or the session, had computed."""
        return self.holding.cached_tokens

    @property
    def max_tokens(self) -> int:
        """The most tokens it can have in the KV cache: the last token of an answer is never computed."""
        return self.prompt.tokens + self.sampling.max_new_tokens - 1

    @property
    def tokens(self) -> int:
        """Tokens of the pruned prompt and the answer so far."""
        return self.prompt.tokens + len(self.output_ids) + self.num_unread

    @property
    def ready_tokens(self) -> int:
        """How many of `tokens` are known: the prompt up to the first missing media item."""
        return self.prompt.ready + len(self.output_ids)

    @property
    def early_tokens(self) -> int:
        """How many of `ready_tokens` may be computed while media are missing."""
        return self.prompt.early + len(self.output_ids)

    @property
    def reusable_tokens(self) -> int:
        """How many of `ready_tokens` may be found in the prefix cache. At least one token is left to compute."""
        return min(self.early_tokens, self.tokens - 1)

    @property
    def wanted_media(self) -> tuple[int, ...]:
        """Indices of the items whose embeddings have not arrived, or not all of them."""
        return tuple(index for index in range(len(self.encoded_media)) if self.prompt.missing(index))

    @cached_property
    def sampling_state(self) -> SamplingState:
        """Random generator and penalties of the answer. Needs the complete prompt."""
        assert self.prompt.complete
        ids = self.prompt.ids[: self.prompt.tokens]
        return SamplingState(self.sampling, ids[ids < self.prompt.vocab_size])

    def add_sibling(
        self,
        id: str,
        sampling: SamplingParams,
        detokenizer: Detokenizer | None,
        on_event: Callable[[Event], None],
    ) -> Request:
        """Adds another answer to the same prompt. It starts when this request has prefilled the prompt."""
        sibling = Request(
            *(id, self.prompt, self.media_keys, sampling, detokenizer, on_event, self.adapter, self.cache_salt),
            yields=self.yields,
        )
        sibling.encoded_media, sibling.embeds = self.encoded_media, self.embeds
        self.siblings.append(sibling)
        return sibling

    def add_media(self, item: MediaItem, encoded: EncodedMedia) -> None:
        """Adds a media item, or what has arrived of it. Raises PeerContract if it contradicts the plan."""
        self.prompt.deliver(item.media_index, item.kept, encoded.id, item.tokens)
        self.encoded_media[item.media_index] = encoded
        self.embeds[item.media_index] = item.embeds

    def reuse_media(self, media_index: int, encoded: EncodedMedia) -> None:
        """Adds a media item whose rows the KV cache has, but for the last."""
        self.prompt.deliver(media_index, encoded.kept, encoded.id)
        self.encoded_media[media_index] = encoded
        self.embeds[media_index] = encoded.last_rows

    def with_media(self, encoded_media: Sequence[EncodedMedia]) -> tuple[PrunedPrompt, list[int]]:
        """Its prompt as it is once the first items are delivered, and for each the end of all rows but its last ones.

        encoded_media: complete items.
        """
        prompt, ends = self.prompt.undelivered(), list[int]()
        for index, encoded in enumerate(encoded_media):
            prompt.deliver(index, encoded.kept, encoded.id)
        for index, encoded in enumerate(encoded_media):
            assert encoded.last_rows is not None
            ends.append(prompt.rows_end(index, prompt.num_kept[index] - encoded.last_rows.shape[1]))
        return prompt, ends

    def append(self, sampled: SampledToken) -> tuple[Delta | Read | Attended, FinishReason | None]:
        """Appends a token that was read. Returns its event, and the reason if the answer ends with it."""
        token_id = sampled.token_id
        self.output_ids.append(token_id)
        ended = token_id in self.sampling.eos_ids
        full = len(self.output_ids) >= self.sampling.max_new_tokens
        text, stopped = "", False
        if self.detokenizer is not None:
            if not ended:
                text, stopped = self.detokenizer.decode([token_id])
            if (ended or full) and not stopped:
                text += self.detokenizer.flush()
        logprobs = () if sampled.logprob is None else (sampled.logprob,)
        delta = Delta(text, (token_id,), logprobs, (sampled.top,) if sampled.top else (), ended)
        return delta, FinishReason.STOP if ended or stopped else FinishReason.LENGTH if full else None

    def content(self, first: int, end: int) -> bytes:
        """`PrunedPrompt.content` for tokens of prompt and answer."""
        prompt_tokens = self.prompt.tokens
        if end <= prompt_tokens:
            return self.prompt.content(first, end)
        own = max(first, prompt_tokens)
        ids = np.array(self.output_ids[own - prompt_tokens : end - prompt_tokens], np.int64)
        positions = np.arange(own, end, dtype=np.int32) + np.int32(self.prompt.delta)
        if own == first:  # as below, without building arrays: identities (0, id), then one position on three axes
            return bytes(ids.nbytes) + ids.tobytes() + 3 * positions.tobytes()
        identities = np.concatenate([self.prompt.identities[:, first:own], [np.zeros_like(ids), ids]], axis=1)
        both = np.concatenate([self.prompt.positions[:, first:own], np.broadcast_to(positions, (3, end - own))], axis=1)
        return identities.tobytes() + both.tobytes()

    def encoded_media_within(self, first: int, end: int) -> tuple[EncodedMedia, ...]:
        """The items that have rows among tokens [first, end)."""
        if not self.prompt.spans or first >= self.prompt.spans[-1].end:
            return ()
        ids = set(self.prompt.identities[0, first:end].tolist()) - {0}
        return tuple(encoded for encoded in self.encoded_media if encoded and encoded.id in ids) if ids else ()

    def move_to(self, status: Status) -> None:
        assert status in TRANSITIONS[self.status], f"{self} cannot become {status.value}"
        self.status = status
        self.since_ns = monotonic_ns()


def _root(adapter: Adapter | None, cache_salt: str) -> int:
    """Parent of the first block: ROOT, or below it and different for every adapter and cache salt, so that sequences
    of different ones share no blocks."""
    return ROOT - int.from_bytes(salted(adapter.digest if adapter else b"", cache_salt))
