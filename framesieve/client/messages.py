"""Converts prompts and options to protobuf requests.

Files are read here, so `generate_request` and `add_messages` block on the disk: call them in a thread. Files and
embeddings are set in the request that is sent, because each message that is put into another is copied.
"""

from __future__ import annotations

import json
import os
import re
import reprlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message as ProtobufMessage

from framesieve.client.prompt import Embeds, Frames, Image, Message, Options, Part, StrPath, Text, Video
from framesieve.client.tools import Tool
from framesieve.common.contract.errors import FramesieveError, InvalidRequest
from framesieve.common.contract.limits import GREATEST_INLINE_BYTES, LARGER_FILES
from framesieve.common.contract.retention import Pruning
from framesieve.common.contract.wire import grid_message
from framesieve.v1 import generation_pb2, prompt_pb2, tensor_pb2

_ROLES = {
    "system": prompt_pb2.ROLE_SYSTEM,
    "user": prompt_pb2.ROLE_USER,
    "assistant": prompt_pb2.ROLE_ASSISTANT,
    "tool": prompt_pb2.ROLE_TOOL,
}
_CHOICES = {
    None: generation_pb2.TOOL_CHOICE_MODE_UNSPECIFIED,
    "auto": generation_pb2.TOOL_CHOICE_MODE_UNSPECIFIED,
    "none": generation_pb2.TOOL_CHOICE_MODE_NONE,
    "required": generation_pb2.TOOL_CHOICE_MODE_REQUIRED,
}
_DTYPES = {
    "float16": tensor_pb2.DTYPE_FLOAT16,
    "bfloat16": tensor_pb2.DTYPE_BFLOAT16,
    "float32": tensor_pb2.DTYPE_FLOAT32,
}
_FIELD_TYPES = {
    FieldDescriptor.CPPTYPE_INT32: "a 32-bit integer",
    FieldDescriptor.CPPTYPE_INT64: "a 64-bit integer",
    FieldDescriptor.CPPTYPE_DOUBLE: "a 64-bit float",
    FieldDescriptor.CPPTYPE_FLOAT: "a 32-bit float",
    FieldDescriptor.CPPTYPE_STRING: "text in Unicode",
    FieldDescriptor.CPPTYPE_MESSAGE: "a mapping of 32-bit integers to 64-bit floats",
}

# What a caller of this package does with files that are too large to send. The command has words of its own.
IN_PYTHON = "larger files as Video(server_path=…), a path below preprocessing's --media-root, or as Video(url=…)"

_NAME_CHARACTERS = 200  # of a URL, in an error

M = TypeVar("M", bound=ProtobufMessage)


def generate_request(messages: Sequence[Message], options: Options) -> generation_pb2.GenerateRequest:
    """The request, with the contents of local files.

    Raises InvalidRequest for more inline media (files, bytes, data: URIs, embeddings) than any service takes and for
    a value that its protobuf field cannot hold; OSError for a file that cannot be read; TypeError for an unknown
    option.
    """
    if unknown := options.keys() - Options.__annotations__.keys():
        raise TypeError(f"unknown option {min(unknown)!r} (how frames are sampled is set in Video)")
    stop, bad_words = options.get("stop") or (), options.get("bad_words") or ()
    for name, given in (("stop", stop), ("bad_words", bad_words)):
        if isinstance(given, str):
            raise InvalidRequest(f"{name} must be a sequence of strings, got the string {given!r}")
    request = _message(
        generation_pb2.GenerateRequest,
        pruning=_message(
            prompt_pb2.Pruning,
            rate=options.get("pruning_rate") or 0.0,
            method=options.get("pruning_method") or "",
            seed=options.get("pruning_seed"),
        ),
        sampling=_message(
            generation_pb2.Sampling,
            max_new_tokens=options.get("max_new_tokens"),
            temperature=options.get("temperature"),
            top_p=options.get("top_p"),
            top_k=options.get("top_k"),
            min_p=options.get("min_p"),
            repetition_penalty=options.get("repetition_penalty"),
            presence_penalty=options.get("presence_penalty"),
            frequency_penalty=options.get("frequency_penalty"),
            seed=options.get("seed"),
            stop=stop,
            stop_token_ids=options.get("stop_token_ids") or (),
            ignore_eos=bool(options.get("ignore_eos")),
            logprobs=bool(options.get("logprobs")),
            top_logprobs=options.get("top_logprobs") or 0,
            n=options.get("n"),
            min_new_tokens=options.get("min_new_tokens"),
            logit_bias=options.get("logit_bias") or {},
            bad_words=bad_words,
            **_structured(options),
        ),
        request_id=options.get("request_id") or "",
        adapter=options.get("adapter"),
        tool_choice=_tool_choice(options),
    )
    request.prompt.tools.extend(map(_tool, options.get("tools") or ()))
    if template_options := options.get("template_options"):
        request.prompt.template_options = json.dumps(template_options)
    add_messages(request.prompt, messages)
    return request


def _structured(options: Options) -> dict[str, Any]:
    """Raises InvalidRequest for both kinds at once."""
    schema, is_object = options.get("json_schema"), options.get("json_object")
    if schema is None:
        return {"json_object": True} if is_object else {}
    if is_object:
        raise InvalidRequest("json_object must not be set together with json_schema")
    return {"json_schema": schema if isinstance(schema, str) else json.dumps(schema)}


def _tool(tool: Tool) -> prompt_pb2.Tool:
    return _message(
        prompt_pb2.Tool,
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
        raise InvalidRequest(f"tool_choice must be auto, none, required or one of the tools, got {choice!r}")
    if choice in (None, "auto") and not single:
        return None
    return generation_pb2.ToolChoice(mode=_CHOICES[choice], single_call=single)


def add_messages(prompt: prompt_pb2.Prompt, messages: Sequence[Message]) -> None:
    """Adds messages to a prompt, with the contents of local files. Raises the same errors as `generate_request`."""
    budget = _InlineBudget()
    for message in messages:
        added = prompt.messages.add(
            role=_ROLES[message.role],
            tool_calls=[
                _message(prompt_pb2.ToolCall, id=each.id, name=each.name, arguments=each.arguments)
                for each in message.tool_calls
            ],
            tool_call_id=message.tool_call_id,
            tool_name=message.tool_name,
        )
        for part in message.parts:
            _set_part(added.parts.add(), part, budget)


_FIELD_OF_MEDIA = re.compile(r"prompt\.messages\[(\d+)\]\.parts\[(\d+)\]\.(?:image|video)((?:\.\w+)*)")


@contextmanager
def media_named(messages: Sequence[Message]) -> Iterator[None]:
    """Puts the file or URL of a media item into errors of the services, which know its field in the prompt only.

    "prompt.messages[0].parts[0].video.frame_sampling.fps must be …" becomes "frame_sampling.fps of clip.mp4 must be …".
    """

    def named(found: re.Match[str]) -> str:
        message, place, field = int(found[1]), int(found[2]), found[3].removeprefix(".")
        parts = messages[message].parts if message < len(messages) else ()
        part = parts[place] if place < len(parts) else None
        if not isinstance(part, Image | Video):
            return found[0]
        name = part.path or part.server_path or (part.url and part.url[:_NAME_CHARACTERS])
        if not name or field.startswith("embeds"):
            return found[0]
        if field in ("", "data", "url"):
            return os.fspath(name)
        return f"{field} of {os.fspath(name)}" if "." in field else field

    try:
        yield
    except FramesieveError as error:
        error.args = (_FIELD_OF_MEDIA.sub(named, str(error)),)
        raise


@contextmanager
def in_words_of_python() -> Iterator[None]:
    """Says in a refusal of large files how a caller of this package names a file without sending it."""
    try:
        yield
    except FramesieveError as error:
        error.args = (str(error).replace(LARGER_FILES, IN_PYTHON),)
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
        self.take(size_bytes, name, f"send {LARGER_FILES}")

    def take(self, size_bytes: int, name: str, remedy: str) -> None:
        if size_bytes > self._left_bytes:
            raise InvalidRequest(
                f"{name} has {size_bytes / 2**20:.1f} MiB, a request carries at most "
                f"{GREATEST_INLINE_BYTES // 2**20} MiB of media ({self._left_bytes / 2**20:.1f} MiB are left): {remedy}"
            )
        self._left_bytes -= size_bytes


def _set_part(message: prompt_pb2.Part, part: Part, budget: _InlineBudget) -> None:
    match part:
        case Text():
            message.MergeFrom(_message(prompt_pb2.Part, text=part.text))
        case Image() | Video():
            media = message.image if isinstance(part, Image) else message.video
            sampling = _message(
                prompt_pb2.FrameSampling,
                fps=part.fps,
                min_frames=part.min_frames,
                max_frames=part.max_frames,
                max_pixels=part.max_pixels,
                start_s=part.start_s,
                end_s=part.end_s,
                allow_truncated=bool(part.allow_truncated),
                num_frames=part.num_frames,
                frame_indices=part.frame_indices or (),
            )
            _set_media(media, part, sampling, budget)
            if part.pruning is not None:
                media.pruning.CopyFrom(pruning_message(part.pruning))


def _set_media(
    message: prompt_pb2.Media, part: Image | Video, sampling: prompt_pb2.FrameSampling, budget: _InlineBudget
) -> None:
    if part.embeds is not None:
        _set_embeds(message.embeds, part.embeds, budget)
        return
    message.frame_sampling.CopyFrom(sampling)
    if isinstance(part, Video) and part.frames is not None:
        _set_frames(message.frames, part.frames, budget)
    elif part.server_path is not None:
        message.MergeFrom(_message(prompt_pb2.Media, path=part.server_path))
    elif part.url is not None:
        budget.take_file(len(part.url), f"{type(part).__name__}.url")  # a data: URL may be long
        message.MergeFrom(_message(prompt_pb2.Media, url=part.url))
    elif part.path is not None:
        message.data = budget.read(part.path)
    else:
        data = part.data or b""
        budget.take_file(len(data), f"{type(part).__name__}.data")
        message.data = data


def _set_frames(message: prompt_pb2.PictureFrames, frames: Frames, budget: _InlineBudget) -> None:
    size_bytes = sum(map(len, frames.pictures))
    budget.take(size_bytes, "Frames.pictures", "send fewer or smaller pictures, or the video file")
    message.MergeFrom(_message(prompt_pb2.PictureFrames, timestamps_s=frames.timestamps_s))
    message.pictures.extend(frames.pictures)


def _set_embeds(message: prompt_pb2.MediaEmbeds, embeds: Embeds, budget: _InlineBudget) -> None:
    values, shape = embeds.values, embeds.array_shape
    size_bytes = len(values) if isinstance(values, bytes) else values.nbytes
    budget.take(size_bytes, "Embeds.values", "send fewer slices, 16-bit values, or the media file")
    if isinstance(values, np.ndarray):
        values = values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes()
    step = embeds.seconds_per_slice
    message.MergeFrom(
        _message(
            prompt_pb2.MediaEmbeds,
            tensor=_message(
                tensor_pb2.Tensor,
                dtype=_DTYPES[embeds.array_dtype],
                shape=shape if len(shape) == 3 else (1, *shape),
            ),
            grid=grid_message(embeds.grid),
            seconds_per_grid=None if step is None else _rational(step),
            timestamps_s=embeds.timestamps_s,
            tile_columns=embeds.tile_columns,
        )
    )
    message.tensor.data = values


def _rational(seconds: Fraction | float) -> prompt_pb2.Rational:
    try:
        exact = Fraction(str(seconds))
        return prompt_pb2.Rational(numerator=exact.numerator, denominator=exact.denominator)
    except ValueError as error:
        raise InvalidRequest(
            f"Embeds.seconds_per_slice must be a quotient of two 64-bit integers, got {seconds}"
        ) from error


def pruning_message(pruning: Pruning) -> prompt_pb2.Pruning:
    return _message(prompt_pb2.Pruning, rate=pruning.rate, method=pruning.method, seed=pruning.seed)


def _message(kind: type[M], **fields: Any) -> M:
    """Raises InvalidRequest naming the first field that cannot hold its value; protobuf's own error names none."""
    try:
        return kind(**fields)
    except (ValueError, OverflowError):
        for name, value in fields.items():
            try:
                kind(**{name: value})
            except (ValueError, OverflowError) as error:
                held = _FIELD_TYPES[kind.DESCRIPTOR.fields_by_name[name].cpp_type]
                message = f"{kind.DESCRIPTOR.name}.{name} must be {held}, got {reprlib.repr(value)}"
                raise InvalidRequest(message) from error
        raise
