"""What comes back: the events of a question in their order, and the whole answer.

    Accepted  Progress*  Delta* Finished                       of several answers (n) each has its own Delta* Finished,
                                                               mixed with the others' and told apart by choice_index

It knows nothing of protobuf (`events`). Token counts are exact, times are seconds on the service's own clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeAlias

from common.contract.plan import Grid, Modality


class FinishReason(Enum):
    """Why an answer ended: the model, a stop string or a stop token ended it, or max_new_tokens were generated."""

    STOP = "stop"
    LENGTH = "length"


TopLogprobs: TypeAlias = tuple[tuple[int, float], ...]
"""The likeliest tokens at one place of an answer with their log-probabilities, the likeliest first."""


@dataclass(frozen=True, slots=True)
class MediaUsage:
    """What one image or video cost.

    grid: its tokens before pruning.
    repaired_frames: frames that could not be decoded and repeat the one before.
    first_slice_only: the rate leaves nothing but the first slice; no motion is left to see.
    """

    modality: Modality
    grid: Grid
    kept_tokens: int
    repaired_frames: int
    first_slice_only: bool


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of the prompt before and after pruning, of the answer, and of each media item in the prompt's order.

    cached_prompt_tokens: of prompt_tokens, how many an earlier question had computed; 0 until the answer is complete.
    """

    prompt_tokens_full: int
    prompt_tokens: int
    completion_tokens: int
    media: tuple[MediaUsage, ...]
    cached_prompt_tokens: int = 0


STAGES = (
    "fetch",
    "plan",
    "decode",
    "resize",
    "wait_for_encoder",
    "encode",
    "prune",
    "transfer",
    "wait_for_prefill",
    "prefill",
)
"""Those before the first token, in their order."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time went. The ten stages partition the time to first token: they sum to it even when they overlap.

    Each instant belongs to the earliest stage that is not finished; a stage that was not needed takes 0.
    """

    time_to_first_token_s: float
    fetch_s: float
    plan_s: float
    decode_s: float
    resize_s: float
    wait_for_encoder_s: float
    encode_s: float
    prune_s: float
    transfer_s: float
    wait_for_prefill_s: float
    prefill_s: float
    generate_s: float

    @property
    def stages_s(self) -> dict[str, float]:
        """The stages before the first token, by name, in their order."""
        return {name: float(getattr(self, f"{name}_s")) for name in STAGES}

    def tokens_per_second(self, completion_tokens: int) -> float:
        """How fast the answer grew after its first token; 0 where nothing came after it."""
        return (completion_tokens - 1) / self.generate_s if completion_tokens > 1 and self.generate_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Accepted:
    """The prompt is laid out and known to fit; its usage already says what pruning leaves."""

    request_id: str
    usage: Usage


@dataclass(frozen=True, slots=True)
class Progress:
    """How far one media item has come, in temporal slices of its grid's `t`."""

    media_index: int
    decoded_slices: int
    encoded_slices: int


@dataclass(frozen=True, slots=True)
class Delta:
    """More of an answer: text that ends at a whole character, its tokens, and their log-probabilities if asked for."""

    choice_index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[TopLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """One answer is complete.

    Of usage and timings, completion_tokens and generate_s are its own; the rest is the question's.
    """

    choice_index: int
    reason: FinishReason
    usage: Usage
    timings: Timings


Event: TypeAlias = Accepted | Progress | Delta | Finished


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a question's answers. logprobs and top_logprobs, one a token, are empty unless they were asked for."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[TopLogprobs, ...]
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Answer:
    """Everything that a question brought: one choice unless `n` asked for more. What is said of one is the first's.

    usage: completion_tokens are those of all choices together.
    timings: generate_s ends with the last of them.
    """

    request_id: str
    choices: tuple[Choice, ...]
    usage: Usage
    timings: Timings

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def logprobs(self) -> tuple[float, ...]:
        return self.choices[0].logprobs

    @property
    def top_logprobs(self) -> tuple[TopLogprobs, ...]:
        return self.choices[0].top_logprobs

    @property
    def reason(self) -> FinishReason:
        return self.choices[0].reason

    def __str__(self) -> str:
        return self.text


def choice_of(finished: Finished, deltas: Sequence[Delta]) -> Choice:
    """The whole of one answer. deltas: of any; those of another are left out."""
    own = [delta for delta in deltas if delta.choice_index == finished.choice_index]
    return Choice(
        index=finished.choice_index,
        text="".join(delta.text for delta in own),
        token_ids=tuple(token for delta in own for token in delta.token_ids),
        logprobs=tuple(value for delta in own for value in delta.logprobs),
        top_logprobs=tuple(top for delta in own for top in delta.top_logprobs),
        reason=finished.reason,
    )


def cost_of(finished: Sequence[Finished]) -> tuple[Usage, Timings]:
    """What all answers cost together. finished: at least one, in the order in which they came."""
    tokens = sum(each.usage.completion_tokens for each in finished)
    return replace(finished[-1].usage, completion_tokens=tokens), finished[-1].timings
