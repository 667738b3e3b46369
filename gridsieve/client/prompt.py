"""What a caller sends: turns of text, images, videos and sounds, and the options of a request.

It knows nothing of protobuf (see `messages`). The services check ranges; only values that the protobuf request cannot
express are rejected here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypedDict
from urllib.parse import unquote

import numpy as np
from numpy.typing import NDArray

from gridsieve.client.live_events import Snapshots
from gridsieve.client.tools import Tool, ToolCall
from gridsieve.common.contract.errors import InvalidRequest
from gridsieve.common.contract.plan import Grid
from gridsieve.common.contract.retention import ItemPruning, named_method

EMBEDS_DTYPES = ("float16", "bfloat16", "float32")
_SOURCES = ("path", "data", "server_path", "url", "frames", "embeds")
_SOUND_SOURCES = ("path", "data", "server_path", "url")
_URL = re.compile(r"(?:https?|file)://[^/?#]*(?P<path>[^?#]*)|data:", re.IGNORECASE)
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_LOGIN = re.compile(r"//[^/?#]*@")
FRAME_SAMPLING = (
    *("fps", "min_frames", "max_frames", "max_pixels", "start_s", "end_s"),
    *("allow_truncated", "num_frames", "frame_indices", "max_slices", "mode"),
)

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]
StrPath: TypeAlias = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Text:
    """Plain text. A control token spelled out in it is not interpreted."""

    text: str


@dataclass(frozen=True, slots=True, eq=False)
class Embeds:
    """The vision tower's output for a whole, unpruned image or video, sent in place of its pixels.

        rows = tower(frames)                                         # torch.float32 [8 · 12 · 16, D]
        Video(embeds=Embeds(rows.numpy(), Grid(8, 12, 16), seconds_per_slice=1.0))

        raw = rows.bfloat16().view(torch.uint8).numpy().tobytes()    # half the size
        Video(embeds=Embeds(raw, Grid(8, 12, 16), dtype="bfloat16", shape=rows.shape, seconds_per_slice=1.0))

    values: float16 or float32 [tokens, D] or, with deepstack, [1 + levels, tokens, D], where level 0 is the embedding;
        tokens in grid order: slices, rows, columns. Or the bytes of such an array, little-endian and in C order.
    grid: tokens after spatial merging; t is 1 for an image.
    dtype, shape: required for bytes, not allowed for arrays: "float16", "bfloat16" (which numpy lacks) or "float32".
    seconds_per_slice, timestamps_s: exactly one of them for a video, neither for an image: the time between temporal
        slices (a float is read as its shortest decimal), or the time of each slice.
    tile_columns: of an image of MiniCPM-V with slices: how many are in a row. Its grid has a row for the source picture
        and for each slice.
    Raises InvalidRequest for another type, dtype or number of axes.
    """

    values: NDArray[np.float16] | NDArray[np.float32] | bytes = field(repr=False)
    grid: Grid
    _: KW_ONLY
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    seconds_per_slice: Fraction | float | None = None
    timestamps_s: tuple[float, ...] = ()
    tile_columns: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.values, (bytes, np.ndarray)):
            raise InvalidRequest(
                f"must be a numpy array or bytes, got {type(self.values).__name__}", field="Embeds.values"
            )
        for name in ("dtype", "shape"):
            if isinstance(self.values, bytes) != (getattr(self, name) is not None):
                limit = "set if values are bytes, and must not be set for an array"
                raise InvalidRequest(field=f"Embeds.{name}", limit=limit)
        if self.array_dtype not in EMBEDS_DTYPES:
            raise InvalidRequest(f"must be {', '.join(EMBEDS_DTYPES)}, got {self.array_dtype}", field="Embeds.values")
        if len(self.array_shape) not in (2, 3):
            limit = "[tokens, D] or [1 + levels, tokens, D]"
            raise InvalidRequest(field="Embeds.values", limit=limit, value=list(self.array_shape))

    @property
    def array_dtype(self) -> str:
        """The element type's name, for arrays and bytes alike."""
        return (self.dtype or "") if isinstance(self.values, bytes) else self.values.dtype.name

    @property
    def array_shape(self) -> tuple[int, ...]:
        """The shape, for arrays and bytes alike."""
        return (self.shape or ()) if isinstance(self.values, bytes) else self.values.shape


@dataclass(frozen=True, slots=True)
class Frames:
    """The frames of a video as pictures, each with its time: of a camera, of a stream, or chosen by the caller.

        Video(frames=Frames((first_jpeg, second_jpeg), timestamps_s=(12.0, 12.5)))

    pictures: the bytes of picture files (JPEG, PNG, WebP, ...), 1 to 768, all of one size.
    timestamps_s: when each is shown, in seconds, increasing; the first need not be 0.
    """

    pictures: tuple[bytes, ...] = field(repr=False)
    timestamps_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Pruning:
    """How videos are pruned, as a request says it. None: not said.

    What a video does not say is taken from its request, and what that does not say from the service's settings. A
    threshold is taken over only where neither a rate nor a method is said. By default nothing is dropped, and a rate
    without a method means "pixel_change" where the model takes it, else "evs" (`GridsieveClient.models` tells it).

    rate: the fraction of a video's tokens to drop, 0 ≤ rate < 1; with a threshold the least.
    method: "evs", "evs_causal", "vidcom2", "vcast", "random", "pixel_change" or "none". seed: for "random".
    threshold: the automatic rate, of "pixel_change", which it implies: tokens whose pixels changed by less are dropped,
        0 ≤ threshold < 1 of the range of a pixel.
    Raises InvalidRequest for a rate or threshold outside its range, an unknown method, and a threshold of another.
    """

    rate: float | None = None
    method: str | None = None
    seed: int | None = None
    threshold: float | None = None

    def __post_init__(self) -> None:
        method = named_method(None, self.threshold) if self.method is None else self.method
        ItemPruning(self.rate or 0.0, method, self.seed, self.threshold)


def _check_one_source(part: object, sources: Sequence[str]) -> None:
    """Raises InvalidRequest unless exactly one of these fields is set."""
    given = [name for name in sources if getattr(part, name) is not None]
    if len(given) != 1:
        known, got = f"{', '.join(sources[:-1])} and {sources[-1]}", ", ".join(given) or "none"
        raise InvalidRequest(f"{type(part).__name__} needs exactly one of {known}, got {got}")


@dataclass(frozen=True, slots=True)
class _Media:
    path: StrPath | None = None
    _: KW_ONLY
    data: bytes | None = None
    server_path: str | None = None
    url: str | None = None
    embeds: Embeds | None = None
    fps: float | None = None
    min_frames: int | None = None
    max_frames: int | None = None
    max_pixels: int | None = None
    start_s: float | None = None
    end_s: float | None = None
    allow_truncated: bool | None = None
    pruning: Pruning | None = None
    num_frames: int | None = None
    frame_indices: tuple[int, ...] | None = None
    max_slices: int | None = None
    mode: str | None = None

    def __post_init__(self) -> None:
        kind = type(self).__name__
        _check_one_source(self, [name for name in _SOURCES if hasattr(self, name)])
        useless = [name for name in FRAME_SAMPLING if getattr(self, name) is not None]
        if self.embeds is not None and useless:
            raise InvalidRequest("must not be set with embeds, which have no frames", field=f"{kind}.{useless[0]}")


@dataclass(frozen=True, slots=True)
class Image(_Media):
    """An image, from exactly one of five sources; of an animation, such as a GIF, its first picture.

    The bytes decide: those of a video are a video, as in Video.

    path: a file on this machine, sent with the request.
    data: the bytes of an image file, sent with the request.
    server_path: a path below preprocessing's --media-root; only the path is sent.
    url: http:// or https://, fetched by preprocessing if its settings allow it; file:///, a path below its
        --media-root; or a data: URL, sent unchanged.
    embeds: the vision tower's output, sent with the request.
    max_pixels: resize to at most this many pixels; None: the checkpoint's limit. Not allowed with embeds.
    max_slices: of MiniCPM-V 2.5 to 4.5: at most so many slices besides the whole; 1: none; None: the checkpoint's.
    The other fields are those of Video, and mean nothing for an image.
    Raises InvalidRequest unless exactly one source is given.
    """


@dataclass(frozen=True, slots=True)
class Video(_Media):
    """A video or an animation, from exactly one of six sources, and how its frames are sampled.

    The bytes decide: a picture that does not move is an image, as in Image.

    path, data, server_path, url, embeds: as for Image.
    frames: pictures, sent with the request; all of them are used unless sampling is set.
    fps, min_frames, max_frames, max_pixels (per frame): None: the checkpoint's default.
    start_s, end_s: the part to sample, in seconds; None: from the start, to the end.
    num_frames: so many, evenly spaced, or all if there are fewer; not together with fps, min_frames or max_frames.
    mode: which frames: "uniform", evenly spread; "keyframes", keyframes alone, which cost a fraction of the decoding;
        "shots", the first of each shot before others. The fields above then say how many at most, and of which part.
        None: "uniform".
    frame_indices: exactly these frames, counted from 0, increasing; not together with the fields above but max_pixels.
    allow_truncated: take a file that was cut off, even if more than a tenth of its frames is missing.
    max_slices: of each frame, as of an image; None: 1.
    None of these settings is allowed with embeds, which have no frames.
    pruning: of this video, before the request's.
    audio: the model hears its sound, too, from the first frame to end_s, or to the end of the track. Not with embeds or
        frames.
    Raises InvalidRequest unless exactly one source is given.
    """

    _: KW_ONLY
    frames: Frames | None = None
    audio: bool = False


@dataclass(frozen=True, slots=True)
class Audio:
    """A sound, from exactly one of four sources: a sound file, or a video file, whose pictures are ignored.

    path, data, server_path, url: as for Image. start_s, end_s: the part that is heard, in seconds; None: from the
    start, to the end.
    Raises InvalidRequest unless exactly one source is given.
    """

    path: StrPath | None = None
    _: KW_ONLY
    data: bytes | None = None
    server_path: str | None = None
    url: str | None = None
    start_s: float | None = None
    end_s: float | None = None

    def __post_init__(self) -> None:
        _check_one_source(self, _SOUND_SOURCES)


class FrameOptions(TypedDict, total=False):
    """Which frames are used: fields of `Video` that several have in common."""

    fps: float | None
    max_frames: int | None
    num_frames: int | None
    max_pixels: int | None
    mode: str | None
    allow_truncated: bool | None


Part: TypeAlias = Text | Image | Video | Audio
PartLike: TypeAlias = Part | StrPath
"""A part of a prompt, or the path or URL of a media file, which is a video or an image as its bytes are."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation: its role, and its text and media in the order in which the model reads them.

        (
            Message("user", (Text("Is it raining in Kyoto?"),)),
            Message("assistant", (), tool_calls=answer.tool_calls),
            Message("tool", (Text('{"rain": true}'),), tool_call_id=answer.tool_calls[0].id),
        )

    tool_calls: what the model called in a turn of "assistant". tool_call_id: the call whose result a turn of "tool" is.
    tool_name: the tool of this call, for templates that show it; "": the name in the call of this id.
    thought: what the model thought before a turn of "assistant"; the chat template decides whether it sees it again.
    """

    role: Role
    parts: tuple[Part, ...]
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    tool_name: str = ""
    thought: str = ""


class Sampling(TypedDict, total=False):
    """How a completion is sampled. A key that is missing or None means the default of the service or checkpoint.

    max_new_tokens, temperature (0 is greedy), top_p, top_k, min_p, repetition_penalty, presence_penalty,
        frequency_penalty, seed: sampling.
    stop, stop_token_ids: a completion ends before the first of these strings, or with the first of these tokens.
    ignore_eos: continue after the model's end tokens; for benchmarks.
    min_new_tokens: a completion does not end by itself before it has so many tokens.
    logit_bias: added to the logits of these token ids, -100 to 100.
    bad_words: texts that a completion does not contain.
    max_thinking_tokens: the most tokens of a completion's thought; None: no limit.
    logprobs: return each token's log-probability. top_logprobs: also return this many of the most likely tokens at each
        position; needs logprobs.
    json_object: whether a completion is a JSON object. json_schema: a JSON schema that it satisfies.
    moments: whether a completion is a list of moments of the prompt's videos (`Answer.moments`), at the times of the
        slices that the model is shown; a number: at multiples of so many seconds. Not in live sessions.
    attention: whether to return what a completion attended to (`Answer.attention`). Not in live sessions.
    """

    max_new_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    seed: int | None
    stop: Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    min_new_tokens: int | None
    logit_bias: Mapping[int, float] | None
    bad_words: Sequence[str] | None
    max_thinking_tokens: int | None
    logprobs: bool | None
    top_logprobs: int | None
    json_object: bool | None
    json_schema: Mapping[str, Any] | str | None
    moments: bool | float | None
    attention: bool | None


class ReadOptions(TypedDict, total=False):
    """Options of every request.

    pruning_rate, pruning_method, pruning_seed, pruning_threshold: of videos that do not say their own; see `Pruning`.
    adapter: the name of a LoRA adapter that the service has loaded. Default: the checkpoint's weights.
    cache_salt: separates caches: only requests of the same salt find what was computed for this one. At most 256
        printable characters. Default: the caches that requests without a salt share.
    yields: True for work that nobody waits for: requests of others come first. Answers are the same.
    request_id: identifies the request in logs and errors. timeout_s: seconds until DeadlinePassed is raised.
    """

    pruning_rate: float | None
    pruning_method: str | None
    pruning_seed: int | None
    pruning_threshold: float | None
    adapter: str | None
    cache_salt: str | None
    yields: bool | None
    request_id: str | None
    timeout_s: float | None


class Options(ReadOptions, Sampling, total=False):
    """Options of a request that generates, and how its completions are sampled.

    tools: functions that the model may call. tool_choice: "auto" (as it likes), "none", "required" (calls and nothing
        else), or the one of the tools that must be called. parallel_tool_calls: False for one call at most.
    template_options: variables of the checkpoint's chat template, such as {"enable_thinking": False}.
    n: the number of completions; the prompt is computed once, and completion i is sampled with seed + i.
    """

    tools: Sequence[Tool] | None
    tool_choice: Literal["auto", "none", "required"] | Tool | None
    parallel_tool_calls: bool | None
    template_options: Mapping[str, Any] | None
    n: int | None


@dataclass(frozen=True, slots=True)
class Trigger:
    """A question that a live session asks by itself, after a slice.

        Trigger("Is the door open?", every_s=5, sampling={"max_new_tokens": 8})

    every_s: whenever so many seconds of the frames' times have passed since it was asked last.
    on_change: whenever this share of a slice's tokens has changed, above 0 and at most 1. At least one of both.
    transient: neither the question nor its answer stays in the conversation.
    """

    question: str
    _: KW_ONLY
    every_s: float | None = None
    on_change: float | None = None
    transient: bool = True
    sampling: Sampling = field(default_factory=Sampling, hash=False)


class LiveOptions(TypedDict, total=False):
    """Of a live session. A key that is missing or None means the default of the service or checkpoint.

    system, history: a system message, and turns of text before the first frame that do not end with the user's.
    pruning: of each slice: "evs_causal" with a rate, "pixel_change" with a threshold, or "none". Default:
        "pixel_change" with the threshold that `GridsieveClient.models` suggests; "none" if the model does not take it.
    fps: how many frames a second are used; 2 by default. max_pixels: of a frame.
    window_tokens: that the session holds before a question, 4096 by default or as many as fit; the oldest slices go.
    answer_tokens: of a question and its answer together, 1024 by default.
    window_s: slices that are older than the newest one by more than this go.
    triggers: questions that the session asks by itself, at most 16; `LiveSession.events` tells their answers.
    source: an rtsp, rtsps, http or https URL that preprocessing watches under its policy, in place of frames.
    source_name: what it is called in metrics and logs. reopens: whether it is opened again whatever ends it, its own
        end included, and whatever it does before its first frame.
    snapshots: with which events a picture of the last frame comes; with none by default.
    adapter, request_id: as in `Options`.
    """

    system: str | None
    history: Sequence[Message]
    pruning: Pruning | None
    fps: float | None
    max_pixels: int | None
    window_tokens: int | None
    answer_tokens: int | None
    window_s: float | None
    triggers: Sequence[Trigger]
    source: str | None
    source_name: str | None
    reopens: bool | None
    snapshots: Snapshots | None
    adapter: str | None
    request_id: str | None


def media_of(location: StrPath) -> Video:
    """The media of a path or URL. A `Video` in either case: preprocessing tells images from videos by their bytes.

    Raises InvalidRequest for another scheme than those of `is_url`.
    """
    check_scheme(location)
    return Video(url=str(location)) if is_url(location) else Video(location)


def is_url(location: StrPath) -> bool:
    """Whether a location starts with http://, https://, file:// or data:, so that it is not a path."""
    return _URL.match(str(location)) is not None


def check_scheme(location: StrPath, supported: Sequence[str] = ("http", "https", "file", "data")) -> None:
    """Raises InvalidRequest for a URL of another scheme, such as s3://bucket/clip.mp4."""
    scheme = _SCHEME.match(str(location))
    if scheme and scheme[1].lower() not in supported:
        known = f"{', '.join(supported[:-1])} and {supported[-1]}"
        shown = _LOGIN.sub("//", str(location))
        raise InvalidRequest(f"{shown} has the scheme {scheme[1]}; supported are {known}")


def file_name(location: StrPath) -> str:
    """The last component of a path, or of a URL's path without its query; "data:" for a data: URL."""
    url = _URL.match(str(location))
    if url is None:
        return Path(location).name
    return "data:" if url["path"] is None else Path(unquote(url["path"])).name


def user_turn(media: PartLike | Sequence[PartLike] | None, text: str) -> Message:
    """The user's turn: the media (and any Text among them), then the question; an empty question adds nothing."""
    if media is None:
        media = ()
    elif isinstance(media, (Text, Image, Video, Audio, str, os.PathLike)):
        media = (media,)
    parts = [item if isinstance(item, Part) else media_of(item) for item in media]
    return Message("user", (*parts, Text(text)) if text else tuple(parts))
