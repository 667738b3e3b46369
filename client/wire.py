"""The client's dataclasses to protobuf and back.

Files are read here, so `generate_request` blocks on the disk: call it in a thread.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import TypedDict

import numpy as np

from client.answer import (
    Accepted,
    Delta,
    Event,
    Finished,
    FinishReason,
    MediaUsage,
    Progress,
    Timings,
    Usage,
)
from client.prompt import Embeds, Image, Message, Part, StrPath, Text, Video
from common.errors import InvalidRequest, PeerContract
from common.plan import Grid
from common.retention import Pruning
from common.wire import MAX_INLINE_BYTES, grid_message, modality_of
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
_REASONS = {
    generation_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    generation_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
}


class Options(TypedDict, total=False):
    """How a question is answered. What is left out, or None, is the service's or the checkpoint's own choice.

    pruning_rate: the share of a video's tokens to drop, 0 ≤ rate < 1.
    pruning_method: "evs", "vidcom2", "random" or "none".
    max_new_tokens, temperature (0 is greedy), top_p, top_k, seed, stop, logprobs: how tokens are chosen.
    request_id: names the request in logs and errors. timeout_s: seconds until DeadlinePassed.
    """

    pruning_rate: float | None
    pruning_method: str | None
    pruning_seed: int | None
    max_new_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    seed: int | None
    stop: Sequence[str] | None
    logprobs: bool | None
    request_id: str | None
    timeout_s: float | None


# --- requests ---------------------------------------------------------------------------------------------------


def generate_request(messages: Sequence[Message], options: Options) -> generation_pb2.GenerateRequest:
    """The request, with the files on this machine read into it.

    Raises InvalidRequest for more than 16 MiB of inline media, embeddings counted in, and OSError for a file that
    cannot be read.
    """
    stop = options.get("stop") or ()
    if isinstance(stop, str):
        raise InvalidRequest(f"stop must be a sequence of strings, got the string {stop!r}")
    return generation_pb2.GenerateRequest(
        prompt=prompt_message(messages),
        pruning=prompt_pb2.Pruning(
            rate=options.get("pruning_rate") or 0.0,
            method=options.get("pruning_method") or "",
            seed=options.get("pruning_seed"),
        ),
        sampling=generation_pb2.Sampling(
            max_new_tokens=options.get("max_new_tokens"),
            temperature=options.get("temperature"),
            top_p=options.get("top_p"),
            top_k=options.get("top_k"),
            seed=options.get("seed"),
            stop=stop,
            logprobs=bool(options.get("logprobs")),
        ),
        request_id=options.get("request_id") or "",
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
            return prompt_pb2.Part(text=part.text)
        case Image():
            return prompt_pb2.Part(image=_media(part, prompt_pb2.FrameSampling(max_pixels=part.max_pixels), room))
        case Video():
            sampling = prompt_pb2.FrameSampling(
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
        return prompt_pb2.Media(path=part.server_path, frame_sampling=sampling)
    if part.url is not None:
        room.take_file(len(part.url), f"{type(part).__name__}.url")  # a data: URI may be long
        return prompt_pb2.Media(url=part.url, frame_sampling=sampling)
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
    return prompt_pb2.MediaEmbeds(
        tensor=tensor_pb2.Tensor(
            dtype=_DTYPES[embeds.array_dtype], shape=shape if len(shape) == 3 else (1, *shape), data=values
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
    return prompt_pb2.Pruning(rate=pruning.rate, method=pruning.method, seed=pruning.seed)


# --- answers ----------------------------------------------------------------------------------------------------


def event_of(response: generation_pb2.GenerateResponse) -> Event:
    """One event of an answer. Raises PeerContract for one that this client does not know."""
    match response.WhichOneof("response"):
        case "accepted":
            return Accepted(response.accepted.request_id, _usage(response.accepted.usage))
        case "progress":
            progress = response.progress
            return Progress(progress.media_index, progress.decoded_slices, progress.encoded_slices)
        case "delta":
            delta = response.delta
            return Delta(delta.choice_index, delta.text, tuple(delta.token_ids), tuple(delta.logprobs))
        case "finished":
            return _finished(response.finished)
        case _:
            raise PeerContract("the service sent an event of a kind that this client does not know")


def _finished(finished: generation_pb2.Finished) -> Finished:
    if finished.reason not in _REASONS:
        raise PeerContract(f"the service ended an answer for the unknown reason {finished.reason}")
    return Finished(
        finished.choice_index, _REASONS[finished.reason], _usage(finished.usage), _timings(finished.timings)
    )


def _usage(usage: generation_pb2.Usage) -> Usage:
    return Usage(
        prompt_tokens_full=usage.prompt_tokens_full,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        media=tuple(
            MediaUsage(
                modality=modality_of(item.modality),
                grid=Grid(item.grid.t, item.grid.h, item.grid.w),
                kept_tokens=item.kept_tokens,
                repaired_frames=item.repaired_frames,
                first_slice_only=item.first_slice_only,
            )
            for item in usage.media
        ),
    )


def _timings(timings: generation_pb2.Timings) -> Timings:
    return Timings(
        time_to_first_token_s=timings.time_to_first_token_s,
        plan_s=timings.plan_s,
        decode_s=timings.decode_s,
        encode_s=timings.encode_s,
        transfer_s=timings.transfer_s,
        queue_s=timings.queue_s,
        prefill_s=timings.prefill_s,
        generate_s=timings.generate_s,
    )
