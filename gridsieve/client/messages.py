"""Converts prompts and options to protobuf requests.

Files are read here, so `generate_request` and `add_messages` block on the disk: call them in a thread. Files and
embeddings are written directly into the final request: protobuf copies a message that is assigned to a field.
"""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar, get_args

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message as ProtobufMessage

from gridsieve.client.prompt import (
    EMBEDS_DTYPES,
    FRAME_SAMPLING,
    Audio,
    Embeds,
    Frames,
    Image,
    LiveOptions,
    Message,
    Options,
    Part,
    Pruning,
    ReadOptions,
    Role,
    Sampling,
    StrPath,
    Text,
    Trigger,
    Video,
)
from gridsieve.client.tools import Tool
from gridsieve.common.contract.errors import GridsieveError, InvalidRequest, within
from gridsieve.common.contract.limits import GREATEST_INLINE_BYTES, LARGER_FILES
from gridsieve.common.contract.wire import grid_message
from gridsieve.v1 import generation_pb2, prompt_pb2, tensor_pb2

_ROLES = {role: prompt_pb2.Role.Value(f"ROLE_{role.upper()}") for role in get_args(Role)}
_CHOICES = {
    None: generation_pb2.TOOL_CHOICE_MODE_UNSPECIFIED,
    "auto": generation_pb2.TOOL_CHOICE_MODE_UNSPECIFIED,
    "none": generation_pb2.TOOL_CHOICE_MODE_NONE,
    "required": generation_pb2.TOOL_CHOICE_MODE_REQUIRED,
}
_DTYPES = {name: tensor_pb2.DType.Value(f"DTYPE_{name.upper()}") for name in EMBEDS_DTYPES}
_FIELD_TYPES = {
    FieldDescriptor.CPPTYPE_INT32: "a 32-bit integer",
    FieldDescriptor.CPPTYPE_INT64: "a 64-bit integer",
    FieldDescriptor.CPPTYPE_DOUBLE: "a 64-bit float",
    FieldDescriptor.CPPTYPE_FLOAT: "a 32-bit float",
    FieldDescriptor.CPPTYPE_STRING: "text in Unicode",
    FieldDescriptor.CPPTYPE_MESSAGE: "a mapping of 32-bit integers to 64-bit floats",
}
# Of LiveOpen, as LiveOptions has them.
_SAME_IN_OPEN = (
    *("fps", "max_pixels", "window_tokens", "answer_tokens", "window_s"),
    *("request_id", "adapter", "source", "source_name", "reopens"),
)

# What a caller of this package does with files that are too large to send. The command has words of its own.
IN_PYTHON = (
    "give larger files as Video(url=…), an https URL, or as Video(server_path=…), a path below preprocessing's "
    "--media-root, or upload them to the gateway's /v1/files"
)

M = TypeVar("M", bound=ProtobufMessage)


def generate_request(messages: Sequence[Message], options: Options) -> generation_pb2.GenerateRequest:
    """The request, with the contents of local files.

    Raises InvalidRequest for more inline media (files, bytes, data: URIs, embeddings) than any service takes and for
    a value that its protobuf field cannot hold; OSError for a file that cannot be read; TypeError for an unknown
    option.
    """
    if unknown := options.keys() - Options.__annotations__.keys():
        raise TypeError(f"unknown option {min(unknown)!r} (how frames are sampled is set in Video)")
    request = _message(
        generation_pb2.GenerateRequest,
        "",
        prompt=_message(prompt_pb2.Prompt, "prompt", **_of_prompt(options)),
        pruning=_pruning(options),
        sampling=_sampling(options, options.get("n")),
        request_id=options.get("request_id"),
        adapter=options.get("adapter"),
        tool_choice=_tool_choice(options),
    )
    request.prompt.tools.extend(
        _tool(tool, f"prompt.tools[{index}]") for index, tool in enumerate(options.get("tools") or ())
    )
    if template_options := options.get("template_options"):
        request.prompt.template_options = json.dumps(template_options)
    add_messages(request.prompt, messages)
    return request


def embed_request(
    messages: Sequence[Message], instruction: str | None, dimensions: int | None, options: ReadOptions
) -> generation_pb2.EmbedRequest:
    """Raises as `generate_request`."""
    prompt = _message(prompt_pb2.Prompt, "prompt", **_of_prompt(options))
    add_messages(prompt, messages)
    return _message(
        generation_pb2.EmbedRequest,
        "",
        prompt=prompt,
        instruction=instruction,
        dimensions=dimensions,
        **_read_options(options),
    )


def score_request(
    query: Message, document: Message, instruction: str | None, options: ReadOptions
) -> generation_pb2.ScoreRequest:
    """query, document: turns of the user. Raises as `generate_request`."""
    both = prompt_pb2.Prompt()
    add_messages(both, [query, document])
    parts = [message.parts for message in both.messages]
    return _message(
        generation_pb2.ScoreRequest,
        "",
        query=parts[0],
        document=parts[1],
        instruction=instruction,
        **_of_prompt(options),
        **_read_options(options),
    )


def _of_prompt(options: ReadOptions) -> dict[str, Any]:
    return {"cache_salt": options.get("cache_salt"), "yields": options.get("yields")}


def _read_options(options: ReadOptions) -> dict[str, Any]:
    """All but those of the prompt. Raises TypeError for an unknown option."""
    if unknown := options.keys() - ReadOptions.__annotations__.keys():
        raise TypeError(f"unknown option {min(unknown)!r}")
    same = {"request_id": options.get("request_id"), "adapter": options.get("adapter")}
    return {"pruning": _pruning(options), **same}


def _pruning(options: ReadOptions) -> prompt_pb2.Pruning:
    given: dict[str, Any] = {name: options.get(f"pruning_{name}") for name in ("rate", "method", "seed", "threshold")}
    return _message(prompt_pb2.Pruning, "pruning", **given)


def _sampling(options: Sampling, n: int | None = None) -> generation_pb2.Sampling:
    """n: how many completions."""
    for name in ("stop", "bad_words"):
        if isinstance(given := options.get(name) or (), str):
            raise InvalidRequest(field=name, limit="a sequence of strings", value=given)
    fields: dict[str, Any] = {name: options.get(name) for name in Sampling.__annotations__}
    for name in ("ignore_eos", "logprobs", "attention"):
        fields[name] = bool(fields[name])
    return _message(generation_pb2.Sampling, "sampling", **fields | _structured(options), n=n)


def _structured(options: Sampling) -> dict[str, Any]:
    """Raises InvalidRequest for two kinds at once."""
    schema, is_object, moments = options.get("json_schema"), options.get("json_object"), options.get("moments")
    if schema is not None and is_object:
        raise InvalidRequest("must not be set together with json_schema", field="json_object")
    is_moments = moments is not None and moments is not False
    if is_moments and (is_object or schema is not None):
        other = "json_object" if is_object else "json_schema"
        raise InvalidRequest(f"must not be set together with {other}", field="moments")
    text = schema if schema is None or isinstance(schema, str) else json.dumps(schema)
    asked = None
    if is_moments:
        asked = _message(generation_pb2.MomentsFormat, "moments", grain_s=None if moments is True else moments)
    return {"json_schema": text, "json_object": True if is_object else None, "moments": asked}


def live_open(options: LiveOptions) -> generation_pb2.LiveOpen:
    """The first request of a live session. Raises InvalidRequest for a value that its field cannot hold."""
    if unknown := options.keys() - LiveOptions.__annotations__.keys():
        raise TypeError(f"unknown option {min(unknown)!r} of a live session")
    system, pruning, snapshots = options.get("system"), options.get("pruning"), options.get("snapshots")
    first = (Message("system", (Text(system),)),) if system else ()
    before = prompt_pb2.Prompt()
    add_messages(before, [*first, *(options.get("history") or ())])
    triggers = [
        _trigger(each, f"open.triggers[{index}]", index) for index, each in enumerate(options.get("triggers") or ())
    ]
    return _message(
        generation_pb2.LiveOpen,
        "open",
        messages=before.messages,
        pruning=None if pruning is None else pruning_message(pruning),
        **{name: options.get(name) for name in _SAME_IN_OPEN},
        snapshots=snapshots and generation_pb2.Snapshots.Value(f"SNAPSHOTS_{snapshots.name}"),
        triggers=triggers,
    )


def _trigger(trigger: Trigger, name: str, index: int) -> generation_pb2.LiveTrigger:
    with within(name):
        ask = live_ask(f"trigger-{index}", [trigger.question], trigger.transient, trigger.sampling)
    return _message(generation_pb2.LiveTrigger, name, ask=ask, every_s=trigger.every_s, on_change=trigger.on_change)


def live_ask(ask_id: str, texts: Sequence[str], transient: bool, sampling: Sampling) -> generation_pb2.LiveAsk:
    """texts: the question. Raises InvalidRequest for a value that its field cannot hold, TypeError for an unknown
    option."""
    if unknown := sampling.keys() - Sampling.__annotations__.keys():
        raise TypeError(f"unknown option {min(unknown)!r} of a question in a live session")
    parts = [_message(prompt_pb2.Part, f"ask.parts[{index}]", text=text) for index, text in enumerate(texts)]
    return generation_pb2.LiveAsk(ask_id=ask_id, parts=parts, sampling=_sampling(sampling), transient=transient)


def _tool(tool: Tool, name: str) -> prompt_pb2.Tool:
    return _message(
        prompt_pb2.Tool,
        name,
        name=tool.name,
        description=tool.description,
        parameters="" if tool.parameters is None else json.dumps(tool.parameters),
        strict=tool.strict,
    )


def _tool_choice(options: Options) -> generation_pb2.ToolChoice | None:
    """None for what the model likes. Raises InvalidRequest for an unknown word."""
    choice, single = options.get("tool_choice"), options.get("parallel_tool_calls") is False
    if isinstance(choice, Tool):
        mode = generation_pb2.TOOL_CHOICE_MODE_REQUIRED
        return generation_pb2.ToolChoice(mode=mode, name=choice.name, single_call=single)
    if choice not in _CHOICES:
        raise InvalidRequest(field="tool_choice", limit="auto, none, required or one of the tools", value=choice)
    if choice in (None, "auto") and not single:
        return None
    return generation_pb2.ToolChoice(mode=_CHOICES[choice], single_call=single)


def add_messages(prompt: prompt_pb2.Prompt, messages: Sequence[Message]) -> None:
    """Adds messages to a prompt, with the contents of local files. Raises the same errors as `generate_request`."""
    budget = _InlineBudget()
    for index, message in enumerate(messages):
        name = f"prompt.messages[{index}]"
        added = prompt.messages.add(
            role=_ROLES[message.role],
            tool_calls=[
                _message(prompt_pb2.ToolCall, f"{name}.tool_calls[{place}]", **asdict(each))
                for place, each in enumerate(message.tool_calls)
            ],
            tool_call_id=message.tool_call_id,
            tool_name=message.tool_name,
            thought=message.thought,
        )
        for place, part in enumerate(message.parts):
            _set_part(added.parts.add(), part, budget, f"{name}.parts[{place}]")


@contextmanager
def python_remedies() -> Iterator[None]:
    """Errors inside that are about files that are too large say what callers of this package can do."""
    try:
        yield
    except GridsieveError as error:
        if error.remedy == LARGER_FILES:
            error.remedy = IN_PYTHON
        raise


class _InlineBudget:
    """The bytes of inline media that a prompt may still carry. The service checks its own --max-inline-bytes."""

    def __init__(self) -> None:
        self._left_bytes = GREATEST_INLINE_BYTES

    def read(self, path: StrPath) -> bytes:
        # stat first: a file that is too large is rejected without reading it into memory.
        self.take_file(Path(path).stat().st_size, os.fspath(path))
        return Path(path).read_bytes()

    def take_file(self, size_bytes: int, name: str) -> None:
        self.take(size_bytes, name, IN_PYTHON)

    def take(self, size_bytes: int, name: str, remedy: str) -> None:
        if size_bytes > self._left_bytes:
            text = (
                f"{name} has {size_bytes / 2**20:.1f} MiB, a request carries at most "
                f"{GREATEST_INLINE_BYTES // 2**20} MiB of media ({self._left_bytes / 2**20:.1f} MiB are left)"
            )
            raise InvalidRequest(text, value=size_bytes, limit=GREATEST_INLINE_BYTES, remedy=remedy)
        self._left_bytes -= size_bytes


def _set_part(message: prompt_pb2.Part, part: Part, budget: _InlineBudget, name: str) -> None:
    match part:
        case Text():
            message.MergeFrom(_message(prompt_pb2.Part, name, text=part.text))
        case Image() | Video():
            kind = "image" if isinstance(part, Image) else "video"
            media, name = getattr(message, kind), f"{name}.{kind}"
            sampling = _message(
                prompt_pb2.FrameSampling,
                f"{name}.frame_sampling",
                **{each: getattr(part, each) for each in FRAME_SAMPLING},
            )
            _set_media(media, part, sampling, budget, name)
            if part.pruning is not None:
                media.pruning.CopyFrom(pruning_message(part.pruning))
            if isinstance(part, Video):
                media.audio = part.audio
        case Audio():
            name = f"{name}.audio"
            heard = {"start_s": part.start_s, "end_s": part.end_s}
            sampling = _message(prompt_pb2.FrameSampling, f"{name}.frame_sampling", **heard)
            message.audio.frame_sampling.CopyFrom(sampling)
            _set_file(message.audio, part, budget, name)


def _set_media(
    message: prompt_pb2.Media, part: Image | Video, sampling: prompt_pb2.FrameSampling, budget: _InlineBudget, name: str
) -> None:
    if part.embeds is not None:
        _set_embeds(message.embeds, part.embeds, budget, f"{name}.embeds")
        return
    message.frame_sampling.CopyFrom(sampling)
    if isinstance(part, Video) and part.frames is not None:
        _set_frames(message.frames, part.frames, budget, f"{name}.frames")
    else:
        _set_file(message, part, budget, name)


def _set_file(message: prompt_pb2.Media, part: Image | Video | Audio, budget: _InlineBudget, name: str) -> None:
    """Where the file is, or its content."""
    if part.server_path is not None:
        message.MergeFrom(_message(prompt_pb2.Media, name, path=part.server_path))
    elif part.url is not None:
        budget.take_file(len(part.url), f"{type(part).__name__}.url")  # a data: URL may be long
        message.MergeFrom(_message(prompt_pb2.Media, name, url=part.url))
    elif part.path is not None:
        message.data = budget.read(part.path)
    else:
        data = part.data or b""
        budget.take_file(len(data), f"{type(part).__name__}.data")
        message.data = data


def _set_frames(message: prompt_pb2.PictureFrames, frames: Frames, budget: _InlineBudget, name: str) -> None:
    size_bytes = sum(map(len, frames.pictures))
    budget.take(size_bytes, "Frames.pictures", "send fewer or smaller pictures, or the video file")
    message.MergeFrom(_message(prompt_pb2.PictureFrames, name, timestamps_s=frames.timestamps_s))
    message.pictures.extend(frames.pictures)


def _set_embeds(message: prompt_pb2.MediaEmbeds, embeds: Embeds, budget: _InlineBudget, name: str) -> None:
    values, shape = embeds.values, embeds.array_shape
    size_bytes = len(values) if isinstance(values, bytes) else values.nbytes
    budget.take(size_bytes, "Embeds.values", "send fewer slices, 16-bit values, or the media file")
    if isinstance(values, np.ndarray):
        values = values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes()
    step = embeds.seconds_per_slice
    message.MergeFrom(
        _message(
            prompt_pb2.MediaEmbeds,
            name,
            tensor=_message(
                tensor_pb2.Tensor,
                f"{name}.tensor",
                dtype=_DTYPES[embeds.array_dtype],
                shape=shape if len(shape) == 3 else (1, *shape),
            ),
            grid=grid_message(embeds.grid),
            seconds_per_grid=None if step is None else _rational(step, f"{name}.seconds_per_grid"),
            timestamps_s=embeds.timestamps_s,
            tile_columns=embeds.tile_columns,
        )
    )
    message.tensor.data = values


def _rational(seconds: Fraction | float, name: str) -> prompt_pb2.Rational:
    try:
        exact = Fraction(str(seconds))
        return prompt_pb2.Rational(numerator=exact.numerator, denominator=exact.denominator)
    except ValueError as error:
        limit = "a quotient of two 64-bit integers"
        raise InvalidRequest(field=name, limit=limit, value=seconds) from error


def pruning_message(pruning: Pruning) -> prompt_pb2.Pruning:
    return _message(prompt_pb2.Pruning, "pruning", **asdict(pruning))


def _message(kind: type[M], path: str, /, **fields: Any) -> M:
    """The message at a path of the request.

    Raises InvalidRequest naming the first field that cannot hold its value; protobuf's own error names none.
    """
    try:
        return kind(**fields)
    except (ValueError, OverflowError):
        for name, value in fields.items():
            try:
                kind(**{name: value})
            except (ValueError, OverflowError) as error:
                limit, got = _FIELD_TYPES[kind.DESCRIPTOR.fields_by_name[name].cpp_type], reprlib.repr(value)
                field = f"{path}.{name}".removeprefix(".")
                raise InvalidRequest(f"must be {limit}, got {got}", field=field, value=got, limit=limit) from error
        raise
