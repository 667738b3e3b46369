"""Conversion between protobuf messages and dataclasses. Malformed messages of a peer raise PeerContract.

Rules about values are in `plan` and `retention`, whose dataclasses validate themselves.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from time import monotonic_ns
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from gridsieve.common.contract.errors import PeerContract, within
from gridsieve.common.contract.plan import (
    MAX_PROMPT_TOKENS,
    FileFacts,
    FrameShape,
    Grid,
    Int32Array,
    MediaPlan,
    Modality,
    PromptPlan,
    Run,
)
from gridsieve.common.contract.retention import BEFORE_TOWER, EVS, ItemPruning, named_method
from gridsieve.common.contract.tensors import DType, TensorBuffer, pieces, shape_of, size_bytes
from gridsieve.v1 import prompt_pb2, tensor_pb2

MAX_MEDIA = 512
# The contents of a part that are media.
MEDIA_KINDS = tuple(each.value for each in Modality)
# Each slice of 512 videos as a run of its own.
MAX_RUNS = 2**18
# Older than any event that is measured. The largest floats overflow when they are converted to nanoseconds.
_MAX_AGO_S = 1e9

Take: TypeAlias = Callable[[int], NDArray[np.uint8]]

_DTYPE_TO_WIRE: dict[DType, tensor_pb2.DType] = {each: getattr(tensor_pb2, f"DTYPE_{each.name}") for each in DType}
_DTYPE_FROM_WIRE = {wire: dtype for dtype, wire in _DTYPE_TO_WIRE.items()}
_MODALITY_TO_WIRE: dict[Modality, prompt_pb2.Modality] = {
    each: getattr(prompt_pb2, f"MODALITY_{each.name}") for each in Modality
}
_MODALITY_FROM_WIRE = {wire: modality for modality, wire in _MODALITY_TO_WIRE.items()}


def dtype_of(wire: tensor_pb2.DType) -> DType:
    """The element type that a peer named. Raises PeerContract for an unknown one."""
    if wire not in _DTYPE_FROM_WIRE:
        raise PeerContract(f"dtype {wire} does not exist")
    return _DTYPE_FROM_WIRE[wire]


# --- arrays -----------------------------------------------------------------------------------------------------


def tensor_chunks(dtype: DType, shape: Sequence[int], data: memoryview) -> Iterator[tensor_pb2.TensorChunk]:
    """The pieces of an array, in order, at least one."""
    for offset, piece in pieces(data):
        chunk = tensor_pb2.TensorChunk()
        fill_chunk(chunk, dtype, shape, offset, piece)
        yield chunk


def fill_chunk(
    chunk: tensor_pb2.TensorChunk, dtype: DType, shape: Sequence[int], offset_bytes: int, piece: memoryview | None
) -> None:
    """Fills an empty message with a piece of an array. Filling a nested message in place avoids a second copy.

    piece: None announces the whole array, which was handed over in shared memory.
    """
    chunk.dtype, chunk.offset_bytes = _DTYPE_TO_WIRE[dtype], offset_bytes
    chunk.shape.extend(shape)
    if piece is None:
        chunk.shared = True
    else:
        chunk.data = bytes(piece)


def buffer_for(
    chunk: tensor_pb2.TensorChunk, dtypes: Sequence[DType], shape: Sequence[int], take: Take | None = None
) -> TensorBuffer:
    """A buffer for the array that `chunk` begins: empty, or complete if the array is in shared memory.

    take: takes so many bytes of shared memory; None: the request named no socket for them.
    Raises PeerContract, before it allocates, if the chunk's type or shape is not an expected one; and what `take` does.
    """
    dtype, sent = dtype_of(chunk.dtype), shape_of(chunk.shape)
    if dtype not in dtypes or sent != tuple(shape):
        allowed = " or ".join(each.label for each in dtypes)
        raise PeerContract(f"expected {allowed} {list(shape)}, got {dtype.label} {list(sent)}")
    if not chunk.shared:
        return TensorBuffer(dtype, shape)
    if take is None or chunk.data or chunk.offset_bytes:
        raise PeerContract("shared memory must be asked for, and holds a whole array")
    return TensorBuffer(dtype, shape, take(size_bytes(dtype, shape)).data)


def add_chunk(buffer: TensorBuffer, chunk: tensor_pb2.TensorChunk) -> None:
    """Adds a piece. Raises PeerContract unless it continues the buffer's array."""
    if not chunk.shared:
        buffer.copy_piece(dtype_of(chunk.dtype), chunk.shape, chunk.offset_bytes, chunk.data)
    elif not buffer.complete:
        raise PeerContract("an array begins in messages and goes on in shared memory")


def int32_tensor(array: Int32Array) -> tensor_pb2.Tensor:
    return tensor_pb2.Tensor(dtype=tensor_pb2.DTYPE_INT32, shape=array.shape, data=array.astype("<i4").tobytes())


def int32_array(tensor: tensor_pb2.Tensor) -> Int32Array:
    """The array of a message. Raises PeerContract for another type or a size that does not match the shape."""
    data, shape = tensor.data, shape_of(tensor.shape)
    if tensor.dtype != tensor_pb2.DTYPE_INT32 or size_bytes(DType.INT32, shape) != len(data):
        raise PeerContract(f"expected int32 {list(shape)}, got dtype {tensor.dtype} and {len(data)} bytes")
    return np.frombuffer(data, "<i4").astype(np.int32, copy=False).reshape(shape)


def tensor_digest(tensor: tensor_pb2.Tensor) -> bytes:
    """sha256 of a tensor's dtype, as an int32, and its bytes. The shape is compared elsewhere."""
    return hashlib.sha256(struct.pack("<i", tensor.dtype) + tensor.data).digest()


# --- pruning ----------------------------------------------------------------------------------------------------


def pruning_message(pruning: ItemPruning) -> prompt_pb2.Pruning:
    return prompt_pb2.Pruning(rate=pruning.rate, method=pruning.method, seed=pruning.seed, threshold=pruning.threshold)


def completed(message: prompt_pb2.Pruning, default: prompt_pb2.Pruning) -> prompt_pb2.Pruning:
    """A new message: `message`, and what it leaves unset from `default`.

    If the message names a rate or a method, the default's threshold is left out, because it would choose the tokens in
    their place. If the message names a threshold and no method, the method becomes one that takes a threshold. If
    neither names a method, the method stays unset.
    """
    whole = prompt_pb2.Pruning()
    whole.CopyFrom(default)
    if message.HasField("rate") or message.method:
        whole.ClearField("threshold")
    if message.HasField("threshold") and whole.method not in BEFORE_TOWER:
        whole.method = named_method("", message.threshold)
    whole.MergeFrom(message)
    return whole


def pruning_of(message: prompt_pb2.Pruning, usual: str = EVS) -> ItemPruning:
    """The pruning that a message asks for. usual: the method of a rate without one. Raises InvalidRequest as
    `ItemPruning`."""
    threshold = message.threshold if message.HasField("threshold") else None
    return ItemPruning(
        rate=message.rate,
        method=named_method(message.method, threshold, usual),
        seed=message.seed if message.HasField("seed") else None,
        threshold=threshold,
    )


def named_media(prompt: prompt_pb2.Prompt) -> Iterator[tuple[str, Modality, prompt_pb2.Media]]:
    """The media of a prompt, in order: the path of the field, the modality that the field declares, and the item."""
    for index, message in enumerate(prompt.messages):
        for place, part in enumerate(message.parts):
            kind = part.WhichOneof("content")
            if kind in MEDIA_KINDS:
                yield f"prompt.messages[{index}].parts[{place}].{kind}", Modality(kind), getattr(part, kind)


def named_items(prompt: prompt_pb2.Prompt) -> Iterator[tuple[str, Modality, prompt_pb2.Media]]:
    """What `named_media` yields, for each item of the prompt's plan: after a video with `audio` the sound of it."""
    for name, modality, media in named_media(prompt):
        yield name, modality, media
        if media.audio:
            yield f"{name}.audio", Modality.AUDIO, media


def prunings_of(prompt: prompt_pb2.Prompt, default: prompt_pb2.Pruning, usual: str = EVS) -> tuple[ItemPruning, ...]:
    """The pruning of each item of the plan: its own, and what that leaves unset from `default` (where that is unset,
    too, nothing is pruned).

    usual: the method of a rate without one; of embeddings, which have no pixels, it is `evs`.
    Raises InvalidRequest, naming the item, for a bad rate or an unknown method.
    """
    shared = {method: pruning_of(default, method) for method in (usual, EVS)}
    prunings = []
    for name, _, media in named_items(prompt):
        method = EVS if media.WhichOneof("source") == "embeds" else usual
        if media.HasField("pruning"):
            with within(name):
                prunings.append(pruning_of(completed(media.pruning, default), method))
        else:
            prunings.append(shared[method])
    return tuple(prunings)


# --- the plan ---------------------------------------------------------------------------------------------------


def plan_messages(plan: PromptPlan) -> Iterator[prompt_pb2.PromptPlan]:
    """The messages of a plan: several, if its layout is larger than one piece."""
    layout = np.ascontiguousarray(np.concatenate([plan.input_ids[None], plan.positions]), "<i4")
    for index, chunk in enumerate(tensor_chunks(DType.INT32, layout.shape, layout.data)):
        if index:
            yield prompt_pb2.PromptPlan(layout=chunk)
            continue
        yield prompt_pb2.PromptPlan(
            layout=chunk,
            media=[_media_message(item) for item in plan.media],
            embed_levels=plan.embed_levels,
            fingerprint=plan.fingerprint,
        )


class PlanReceiver:
    """Assembles a plan from its messages."""

    def __init__(self) -> None:
        self._first: prompt_pb2.PromptPlan | None = None
        self._layout: TensorBuffer | None = None

    def take_message(self, message: prompt_pb2.PromptPlan) -> PromptPlan | None:
        """The plan, if this was its last message, else None. Raises PeerContract for an impossible plan."""
        if self._first is None or self._layout is None:
            shape = shape_of(message.layout.shape)
            if len(shape) != 2 or shape[0] != 4:
                raise PeerContract(f"a plan's layout has the shape [4, N], got {list(shape)}")
            if shape[1] > MAX_PROMPT_TOKENS:
                raise PeerContract(f"a plan has at most {MAX_PROMPT_TOKENS} tokens, got {shape[1]}")
            _check_counts(message)
            self._first = message
            self._layout = buffer_for(message.layout, [DType.INT32], shape)
        elif message.media or message.embed_levels or message.fingerprint:
            raise PeerContract("only the first message of a plan may hold more than layout")
        add_chunk(self._layout, message.layout)
        return self._plan(self._first, self._layout) if self._layout.complete else None

    def _plan(self, first: prompt_pb2.PromptPlan, layout: TensorBuffer) -> PromptPlan:
        rows = np.frombuffer(layout.data, "<i4").astype(np.int32, copy=False).reshape(layout.shape)
        try:
            return PromptPlan(
                input_ids=rows[0],
                positions=rows[1:],
                media=tuple(_media_plan(item) for item in first.media),
                embed_levels=first.embed_levels,
                fingerprint=first.fingerprint,
            )
        except ValueError as error:
            raise PeerContract(f"the plan contradicts itself: {error}") from error


def _media_message(item: MediaPlan) -> prompt_pb2.MediaPlan:
    base, frames = item.seconds_per_grid, item.frames
    tile_px = frames.tile_px or (0, 0)
    return prompt_pb2.MediaPlan(
        modality=_MODALITY_TO_WIRE[item.modality],
        grid=grid_message(item.grid),
        runs=[prompt_pb2.Run(offset=run.offset, length=run.length) for run in item.runs],
        frames=frames.count,
        frame_height_px=frames.size_px[0],
        frame_width_px=frames.size_px[1],
        seconds_per_grid=None
        if base is None
        else prompt_pb2.Rational(numerator=base.numerator, denominator=base.denominator),
        timestamps_s=item.timestamps_s,
        content_hash=item.content_hash,
        missing_frames=item.file.missing_frames,
        dropped_frames=item.file.dropped_frames,
        source_height_px=item.file.source_px[0],
        source_width_px=item.file.source_px[1],
        tile_height_px=tile_px[0],
        tile_width_px=tile_px[1],
        group_frames=frames.group_frames,
        tile_columns=frames.tile_columns,
        fixed_tokens=item.fixed_tokens,
        timed_by_first=item.timed_by_first,
        sampling_mode=item.sampling_mode,
        frame_dtype=_DTYPE_TO_WIRE[frames.dtype],
        heard_s=item.heard_s,
    )


def _check_counts(message: prompt_pb2.PromptPlan) -> None:
    """Raises PeerContract for more media or runs than a prompt may have, before anything loops over them."""
    runs = sum(len(item.runs) for item in message.media[: MAX_MEDIA + 1])
    if len(message.media) > MAX_MEDIA or runs > MAX_RUNS:
        raise PeerContract(
            f"a plan has at most {MAX_MEDIA} media and {MAX_RUNS} runs, got {len(message.media)} and {runs}"
        )


def _media_plan(message: prompt_pb2.MediaPlan) -> MediaPlan:
    base, tile_px = message.seconds_per_grid, (message.tile_height_px, message.tile_width_px)
    if message.HasField("seconds_per_grid") and base.denominator < 1:
        raise ValueError(f"seconds_per_grid.denominator must be at least 1, got {base.denominator}")
    return MediaPlan(
        modality=modality_of(message.modality),
        grid=Grid(message.grid.t, message.grid.h, message.grid.w),
        runs=tuple(Run(run.offset, run.length) for run in message.runs),
        frames=FrameShape(
            message.frames,
            (message.frame_height_px, message.frame_width_px),
            tile_px if any(tile_px) else None,
            message.tile_columns,
            message.group_frames,
            dtype_of(message.frame_dtype) if message.frame_dtype else DType.UINT8,
        ),
        seconds_per_grid=Fraction(base.numerator, base.denominator) if message.HasField("seconds_per_grid") else None,
        timestamps_s=tuple(message.timestamps_s),
        content_hash=message.content_hash,
        file=FileFacts(
            message.missing_frames, message.dropped_frames, (message.source_height_px, message.source_width_px)
        ),
        fixed_tokens=message.fixed_tokens,
        timed_by_first=message.timed_by_first,
        sampling_mode=message.sampling_mode,
        heard_s=message.heard_s,
    )


def grid_message(grid: Grid) -> prompt_pb2.Grid:
    return prompt_pb2.Grid(t=grid.t, h=grid.h, w=grid.w)


def modality_message(modality: Modality) -> prompt_pb2.Modality:
    return _MODALITY_TO_WIRE[modality]


def modality_of(wire: prompt_pb2.Modality) -> Modality:
    """The modality that a peer named. Raises PeerContract for an unknown one."""
    if wire not in _MODALITY_FROM_WIRE:
        raise PeerContract(f"modality {wire} does not exist")
    return _MODALITY_FROM_WIRE[wire]


# --- ages -------------------------------------------------------------------------------------------------------
#
# Hosts send how long ago an event was, so that their clocks are never compared. The time of the message on its way
# is the only error:
#
#     sender    event ────────── sent       "1.5 s ago"
#     receiver                received ▶ event = received − 1.5 s


def ago_s(at_ns: int) -> float:
    """Seconds since at_ns, in nanoseconds of this host's monotonic clock; 0 for a time in the future."""
    return max(0, monotonic_ns() - at_ns) * 1e-9


def from_ago_s(peers_ago_s: float, received_ns: int) -> int:
    """When an event that a peer reported happened, in nanoseconds of this host's monotonic clock.

    Raises PeerContract for a negative or infinite age.
    """
    if not (math.isfinite(peers_ago_s) and peers_ago_s >= 0):
        raise PeerContract(f"an age must be finite and at least 0 seconds, got {peers_ago_s}")
    return received_ns - round(min(peers_ago_s, _MAX_AGO_S) * 1e9)
