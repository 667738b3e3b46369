"""What a caller asks, to protobuf; `framesieve.client.events` has the way back.

Files are read here, so `generate_request` blocks on the disk: call it in a thread.
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message as ProtobufMessage

from common.contract.errors import InvalidRequest
from common.contract.requests import MAX_INLINE_BYTES
from common.contract.retention import Pruning
from common.contract.wire import grid_message
from framesieve.client.prompt import Embeds, Image, Message, Part, StrPath, Text, Video
from framesieve.v1 import generation_pb2, prompt_pb2, tensor_pb2

_ROLES = {
    "system": prompt_pb2.ROLE_SYSTEM,
    "user": prompt_pb2.ROLE_USER,
    "assistant": prompt_pb2.ROLE_ASSISTANT,
}
_DTYPES = {
    "float16": tensor_pb2.DTYPE_FLOAT16,
    "bfloat16": tensor_pb2.DTYPE_BFLOAT16,
    "float32": tensor_pb2.DTYPE_FLOAT32,
}
_HELD = {
    FieldDescriptor.CPPTYPE_INT32: "a 32-bit integer",
    FieldDescriptor.CPPTYPE_INT64: "a 64-bit integer",
    FieldDescriptor.CPPTYPE_DOUBLE: "a 64-bit float",
    FieldDescriptor.CPPTYPE_FLOAT: "a 32-bit float",
    FieldDescriptor.CPPTYPE_STRING: "text in Unicode",
}

M = TypeVar("M", bound=ProtobufMessage)


class Options(TypedDict, total=False):
    """How a question is answered. What is left out, or None, is the service's or the checkpoint's own choice.

    pruning_rate: the share of a video's tokens to drop, 0 ≤ rate < 1.
    pruning_method: "evs", "vidcom2", "random" or "none".
    max_new_tokens, temperature (0 is greedy), top_p, top_k, min_p, repetition_penalty, presence_penalty,
        frequency_penalty, seed: how tokens are chosen.
    stop, stop_token_ids: an answer ends before the first of these strings, and with the first of these tokens.
    ignore_eos: the model's own end tokens end nothing, for measuring.
    logprobs: of each token; top_logprobs: of so many of the likeliest beside it, which needs logprobs.
    adapter: which of the adapters that the service has loaded answers; none is the checkpoint's own weights alone.
    n: how many answers; the prompt is computed once, and answer i is drawn by seed + i.
    request_id: names the request in logs and errors. timeout_s: seconds until DeadlinePassed.
    """

    pruning_rate: float | None
    pruning_method: str | None
    pruning_seed: int | None
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
    logprobs: bool | None
    top_logprobs: int | None
    adapter: str | None
    n: int | None
    request_id: str | None
    timeout_s: float | None


def generate_request(messages: Sequence[Message], options: Options) -> generation_pb2.GenerateRequest:
    """The request, with the files on this machine read into it.

    Raises InvalidRequest for more than 16 MiB of inline media, embeddings counted in, and for what no request can hold;
    OSError for a file that cannot be read.
    """
    stop = options.get("stop") or ()
    if isinstance(stop, str):
        raise InvalidRequest(f"stop must be a sequence of strings, got the string {stop!r}")
    return _message(
        generation_pb2.GenerateRequest,
        prompt=prompt_message(messages),
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
        ),
        request_id=options.get("request_id") or "",
        adapter=options.get("adapter"),
    )


def prompt_message(messages: Sequence[Message]) -> prompt_pb2.Prompt:
    """The prompt, with the files on this machine read into it. Raises as `generate_request` does."""
    room = _InlineRoom()
    return prompt_pb2.Prompt(
        messages=[
            prompt_pb2.Message(role=_ROLES[message.role], parts=[_part(part, room) for part in message.parts])
            for message in messages
        ]
    )


class _InlineRoom:
    """How many bytes of media a prompt may still carry."""

    def __init__(self) -> None:
        self._left_bytes = MAX_INLINE_BYTES

    def read(self, path: StrPath) -> bytes:
        # The size is asked first: a film should be refused, not read into memory to be refused.
        self.take_file(Path(path).stat().st_size, os.fspath(path))
        return Path(path).read_bytes()

    def take_file(self, size_bytes: int, name: str) -> None:
        self.take(size_bytes, name, "put it below preprocessing's --media-root and name it with server_path=")

    def take(self, size_bytes: int, name: str, remedy: str) -> None:
        if size_bytes > self._left_bytes:
            raise InvalidRequest(
                f"{name} has {size_bytes / 2**20:.1f} MiB, a prompt carries at most {MAX_INLINE_BYTES // 2**20} MiB of "
                f"media ({self._left_bytes / 2**20:.1f} MiB are left): {remedy}"
            )
        self._left_bytes -= size_bytes


def _part(part: Part, room: _InlineRoom) -> prompt_pb2.Part:
    match part:
        case Text():
            return _message(prompt_pb2.Part, text=part.text)
        case Image():
            sampling = _message(prompt_pb2.FrameSampling, max_pixels=part.max_pixels)
            return prompt_pb2.Part(image=_media(part, sampling, room))
        case Video():
            sampling = _message(
                prompt_pb2.FrameSampling,
                fps=part.fps,
                min_frames=part.min_frames,
                max_frames=part.max_frames,
                max_pixels=part.max_pixels,
                start_s=part.start_s,
                end_s=part.end_s,
            )
            media = _media(part, sampling, room)
            if part.pruning is not None:
                media.pruning.CopyFrom(pruning_message(part.pruning))
            return prompt_pb2.Part(video=media)


def _media(part: Image | Video, sampling: prompt_pb2.FrameSampling, room: _InlineRoom) -> prompt_pb2.Media:
    if part.embeds is not None:
        return prompt_pb2.Media(embeds=_embeds(part.embeds, room))
    if part.server_path is not None:
        return _message(prompt_pb2.Media, path=part.server_path, frame_sampling=sampling)
    if part.url is not None:
        room.take_file(len(part.url), f"{type(part).__name__}.url")  # a data: URI may be long
        return _message(prompt_pb2.Media, url=part.url, frame_sampling=sampling)
    if part.path is not None:
        return prompt_pb2.Media(data=room.read(part.path), frame_sampling=sampling)
    data = part.data or b""
    room.take_file(len(data), f"{type(part).__name__}.data")
    return prompt_pb2.Media(data=data, frame_sampling=sampling)


def _embeds(embeds: Embeds, room: _InlineRoom) -> prompt_pb2.MediaEmbeds:
    values, shape = embeds.values, embeds.array_shape
    size_bytes = len(values) if isinstance(values, bytes) else values.nbytes
    room.take(size_bytes, "Embeds.values", "send fewer slices, 16-bit values, or the media themselves")
    if isinstance(values, np.ndarray):
        values = values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes()
    step = embeds.seconds_per_slice
    return _message(
        prompt_pb2.MediaEmbeds,
        tensor=_message(
            tensor_pb2.Tensor,
            dtype=_DTYPES[embeds.array_dtype],
            shape=shape if len(shape) == 3 else (1, *shape),
            data=values,
        ),
        grid=grid_message(embeds.grid),
        seconds_per_grid=None if step is None else _rational(step),
        timestamps_s=embeds.timestamps_s,
    )


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
    """Raises InvalidRequest that names the first field which cannot hold its value: protobuf names none."""
    try:
        return kind(**fields)
    except (ValueError, OverflowError):
        for name, value in fields.items():
            try:
                kind(**{name: value})
            except (ValueError, OverflowError) as error:
                held = _HELD[kind.DESCRIPTOR.fields_by_name[name].cpp_type]
                told = f"{kind.DESCRIPTOR.name}.{name} must be {held}, got {reprlib.repr(value)}"
                raise InvalidRequest(told) from error
        raise
