"""The events of a request, in order, and the complete answer that they add up to.

    Accepted  Progress*  Delta* Finished             With n > 1, each completion has its own Delta* Finished,
                                                     interleaved with the others' and told apart by choice_index.

It knows nothing of protobuf (see `events`). Token counts are exact; times are seconds measured by the service.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import TypeAlias

from gridsieve.client.attention import Attention
from gridsieve.client.tools import ToolCall, ToolCallDelta, joined_calls
from gridsieve.common.contract.plan import Grid, Modality


class FinishReason(Enum):
    """Why a completion ended: STOP at an end token, stop string or stop token, LENGTH after max_new_tokens, TOOL_CALLS
    as STOP where it has tool calls and none was cut off, CANCELLED by `LiveSession.cancel`."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CANCELLED = "cancelled"


TopLogprobs: TypeAlias = tuple[tuple[int, float], ...]
"""(token id, log-probability) of the most likely tokens at one position of a completion, most likely first."""


@dataclass(frozen=True, slots=True)
class PruningMethod:
    """A pruning method that a model takes.

    before_tower: whether it chooses tokens before the vision tower, which then computes the kept ones alone.
    suggested_threshold: one to begin with; None: it takes no threshold.
    """

    name: str
    before_tower: bool
    suggested_threshold: float | None


@dataclass(frozen=True, slots=True)
class Model:
    """What a request may name: the checkpoint, or an adapter (`Options.adapter`).

    max_model_len: tokens of one sequence, the prompt after pruning and its answer.
    pruning_rate, pruning_method, pruning_threshold: of videos for which a request names none.
    pruning_methods: those that a request may name.
    task: what it does: "generate", "embed" or "score". instruction: of prompts to embed or to score that have none.
    sounds: whether prompts may have sounds.
    """

    name: str
    is_adapter: bool
    max_model_len: int
    pruning_rate: float
    pruning_method: str
    pruning_threshold: float | None
    pruning_methods: tuple[PruningMethod, ...]
    task: str = "generate"
    instruction: str = ""
    sounds: bool = False


@dataclass(frozen=True, slots=True)
class MediaUsage:
    """Token counts of one image, video or sound. A video with `audio` has two, its own and that of its sound.

    grid: its tokens before pruning.
    repaired_frames: frames that could not be decoded and were replaced by the previous frame.
    missing_frames: frames that the file's container declares but the file lacks, because it was cut off.
    dropped_frames: frames that have the same time as another one, and are not shown.
    sampling_mode: how the frames of a video were chosen, as `Video.mode`; "" where nothing was sampled: of an image,
        embeddings, and frames that the caller named.
    sampled_frames: how many different frames of a video the model is shown; 0 for an image, a sound and embeddings.
    heard_s: how many seconds of a sound the model hears; 0 for others.
    first_slice_only: at this rate only the first temporal slice is kept, so the model sees no motion.
    """

    modality: Modality
    grid: Grid
    num_kept: int
    repaired_frames: int
    first_slice_only: bool
    missing_frames: int = 0
    dropped_frames: int = 0
    sampling_mode: str = ""
    sampled_frames: int = 0
    heard_s: float = 0.0

    @property
    def pruning_rate(self) -> float:
        """The share of its tokens that was dropped."""
        return 1 - self.num_kept / self.grid.tokens


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request; `media` has one entry for each image, video and sound, in the prompt's order.

    prompt_tokens_full, prompt_tokens: before and after pruning.
    cached_prompt_tokens: how many of prompt_tokens were prefix cache hits; 0 in `Accepted`, before prefill.
    draft_tokens, accepted_draft_tokens: verified for the answer, and those of them that are part of it.
    thought_tokens: those of completion_tokens that are the thought, with the marks around it that were generated.
    """

    prompt_tokens_full: int
    prompt_tokens: int
    completion_tokens: int
    media: tuple[MediaUsage, ...]
    cached_prompt_tokens: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    thought_tokens: int = 0


# What `Usage` counts of one completion alone.
_OF_A_COMPLETION = ("completion_tokens", "draft_tokens", "accepted_draft_tokens", "thought_tokens")


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds spent in each stage. The ten stages before the first token sum to the time to first token.

    Stages overlap; each instant is attributed to the earliest unfinished stage. An unused stage has 0 seconds.
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
        """Seconds of each stage before the first token, in order."""
        return {name: float(getattr(self, f"{name}_s")) for name in STAGES}


STAGES = tuple(each.name.removesuffix("_s") for each in fields(Timings))[1:-1]
"""The stages before the first token, in order."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """The prompt is laid out and fits the model; usage already has the token counts after pruning."""

    request_id: str
    usage: Usage


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of one media item, in temporal slices of a video or frames of an image."""

    media_index: int
    decoded_slices: int
    encoded_slices: int


@dataclass(frozen=True, slots=True)
class Delta:
    """The next piece of a completion: text that ends at a whole character, and its tokens.

    logprobs and top_logprobs have one entry a token, or are empty if not requested.
    token_texts: with logprobs, the text of each token id in token_ids and top_logprobs, decoded alone.
    token_bytes: the bytes of those of them that are only a part of a character.
    tool_calls, thought: the next parts of tool calls and of the thought, whose text is not in `text`.
    """

    choice_index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[TopLogprobs, ...] = ()
    token_texts: Mapping[int, str] = field(default_factory=dict)
    token_bytes: Mapping[int, bytes] = field(default_factory=dict)
    tool_calls: tuple[ToolCallDelta, ...] = ()
    thought: str = ""


@dataclass(frozen=True, slots=True)
class Moment:
    """A part of a video, and what a completion says of it (`Sampling.moments`).

    media_index: the video among the prompt's media. start_s, end_s: seconds of the video.
    first_slice, last_slice: the temporal slices of the video's grid that are shown at both times.
    kept: whether pruning kept tokens of one of the slices from first to last: else the model saw nothing of it.
    """

    media_index: int
    start_s: float
    end_s: float
    description: str
    first_slice: int
    last_slice: int
    kept: bool


@dataclass(frozen=True, slots=True)
class Finished:
    """One completion is finished.

    completion_tokens and generate_s are those of this completion; the rest of usage and timings is the request's.
    moments: of a completion in moments. attention: what it attended to; None unless requested.
    """

    choice_index: int
    reason: FinishReason
    usage: Usage
    timings: Timings
    moments: tuple[Moment, ...] = ()
    attention: Attention | None = None


Event: TypeAlias = Accepted | Progress | Delta | Finished


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a request's n answers.

    logprobs, top_logprobs, token_texts, token_bytes, tool_calls and thought are those of its deltas. A call that was
    cut off by the end of an answer (STOP) is only in `text`. moments: those that its text names, if they were asked
    for. attention: what its tokens attended to, if that was asked for.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[TopLogprobs, ...]
    reason: FinishReason
    token_texts: Mapping[int, str] = field(default_factory=dict)
    token_bytes: Mapping[int, bytes] = field(default_factory=dict)
    tool_calls: tuple[ToolCall, ...] = ()
    thought: str = ""
    moments: tuple[Moment, ...] = ()
    attention: Attention | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """The complete result of a request: its n answers, usage and timings.

    choices: the answers, as OpenAI calls them. text, token_ids, logprobs, top_logprobs, tool_calls, thought, moments,
    attention, reason: those of the first one.
    usage: completion_tokens is the sum over all answers.
    timings: generate_s ends with the last answer.
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
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return self.choices[0].tool_calls

    @property
    def thought(self) -> str:
        return self.choices[0].thought

    @property
    def moments(self) -> tuple[Moment, ...]:
        return self.choices[0].moments

    @property
    def attention(self) -> Attention | None:
        return self.choices[0].attention

    @property
    def reason(self) -> FinishReason:
        return self.choices[0].reason

    def __str__(self) -> str:
        return self.text


def choice_of(finished: Finished, deltas: Sequence[Delta]) -> Choice:
    """Joins the deltas of the finished completion; deltas of other completions are ignored."""
    own = [delta for delta in deltas if delta.choice_index == finished.choice_index]
    calls = joined_calls([part for delta in own for part in delta.tool_calls])
    return Choice(
        index=finished.choice_index,
        text="".join(delta.text for delta in own),
        token_ids=tuple(token for delta in own for token in delta.token_ids),
        logprobs=tuple(value for delta in own for value in delta.logprobs),
        top_logprobs=tuple(top for delta in own for top in delta.top_logprobs),
        reason=finished.reason,
        token_texts={token_id: text for delta in own for token_id, text in delta.token_texts.items()},
        token_bytes={token_id: data for delta in own for token_id, data in delta.token_bytes.items()},
        tool_calls=calls[:-1] if finished.reason is FinishReason.STOP else calls,
        thought="".join(delta.thought for delta in own),
        moments=finished.moments,
        attention=finished.attention,
    )


def cost_of(finished: Sequence[Finished]) -> tuple[Usage, Timings]:
    """Usage and timings over all completions. finished: at least one, in order of arrival."""
    sums = {name: sum(getattr(each.usage, name) for each in finished) for name in _OF_A_COMPLETION}
    return replace(finished[-1].usage, **sums), finished[-1].timings
