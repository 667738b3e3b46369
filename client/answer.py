"""What comes back: the events of one answer in their order, and the whole answer.

    Accepted  Progress* Delta* Finished

It knows nothing of protobuf (`client.wire`). Token counts are exact, times are seconds on the service's own clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from common.plan import Grid, Modality


class FinishReason(Enum):
    """Why an answer ended: the model or a stop string ended it, or max_new_tokens were generated."""

    STOP = "stop"
    LENGTH = "length"


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
    """Tokens of the prompt before and after pruning, of the answer, and of each media item in the prompt's order."""

    prompt_tokens_full: int
    prompt_tokens: int
    completion_tokens: int
    media: tuple[MediaUsage, ...]


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time went. The six stages partition the time to first token: they sum to it even when they overlap."""

    time_to_first_token_s: float
    plan_s: float
    decode_s: float
    encode_s: float
    transfer_s: float
    queue_s: float
    prefill_s: float
    generate_s: float

    @property
    def stages_s(self) -> dict[str, float]:
        """The stages before the first token, by name, in their order."""
        names = ("plan", "decode", "encode", "transfer", "queue", "prefill")
        return {name: float(getattr(self, f"{name}_s")) for name in names}

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
    """More of the answer: text that ends at a whole character, its tokens, and their log-probabilities if asked for."""

    choice_index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """The answer is complete."""

    choice_index: int
    reason: FinishReason
    usage: Usage
    timings: Timings


Event: TypeAlias = Accepted | Progress | Delta | Finished


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer. logprobs is empty unless it was asked for."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    reason: FinishReason
    usage: Usage
    timings: Timings

    def __str__(self) -> str:
        return self.text
