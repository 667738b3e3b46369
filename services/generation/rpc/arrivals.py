"""One media item on its way from the encoder: its pieces, checked one by one, put together to what the model takes.

It knows neither streams nor room: `media` reads the one and reserves the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from framesieve.v1 import encoder_pb2

from common.contract.plan import tagged_digest
from common.contract.errors import PeerContract
from common.contract.plan import Int32Array, MediaPlan
from common.contract.tensors import DType, TensorBuffer
from common.contract.wire import add_chunk, buffer_for, int32_array
from common.contract.wire import from_ago_s
from common.telemetry.metrics import busy
from services.generation.request.encoded_media import MediaItem
from services.generation.rpc.timing import Stage
from services.generation.to_device import pinned_for

TORCH_DTYPES = {DType.BFLOAT16: torch.bfloat16, DType.FLOAT16: torch.float16, DType.FLOAT32: torch.float32}
_DOMAIN = b"framesieve media item v2"


@dataclass(frozen=True, slots=True)
class ModelInput:
    """What the language model takes, and so what peers must send.

    fingerprint: of its checkpoint. embed_levels: tensors beside a media token's embedding. dtype, device: of its
    weights.
    """

    fingerprint: bytes
    vocab_size: int
    hidden_size: int
    embed_levels: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a media item has come, in temporal slices."""

    media_index: int
    decoded_slices: int
    encoded_slices: int


class Arrival:
    """One item's pieces, as they come. Raises PeerContract for any that does not fit the plan."""

    def __init__(self, index: int, plan: MediaPlan, count: int, model: ModelInput) -> None:
        self._index = index
        self._plan = plan
        self._shape = (1 + model.embed_levels, count, model.hidden_size)
        self._dtype = model.dtype
        self._device = model.device
        self._buffer: TensorBuffer | None = None
        self._kept: Int32Array | None = None
        self._repaired_frames = 0
        self._progress = Progress(index, 0, 0)
        self.left_ns: dict[Stage, int] = {}  # when it left each stage that it went through, once it has begun to arrive

    @property
    def begun(self) -> bool:
        return self._buffer is not None

    @property
    def complete(self) -> bool:
        return self._buffer is not None and self._buffer.complete

    def progress(self, message: encoder_pb2.MediaProgress) -> Progress:
        decoded, encoded, last = message.decoded_slices, message.encoded_slices, self._progress
        reached = Progress(self._index, decoded, encoded)
        falls = decoded < last.decoded_slices or encoded < last.encoded_slices
        # What says nothing new could be said for ever.
        if falls or reached == last or not encoded <= decoded <= self._plan.grid.t:
            raise PeerContract(
                f"item {self._index} of {self._plan.grid.t} slices came from {last.decoded_slices} decoded and "
                f"{last.encoded_slices} encoded to {decoded} and {encoded}"
            )
        self._progress = reached
        return reached

    def add(self, message: encoder_pb2.EmbedsChunk, heard_ns: int) -> None:
        """Takes a piece that was read at `heard_ns` of the clock that `left_ns` is told by."""
        if self.complete:
            raise PeerContract(f"item {self._index} was sent twice")
        if self._buffer is None:
            self._kept = self._checked_kept(message)
            if not 0 <= message.repaired_frames <= self._plan.frames:
                raise PeerContract(f"{message.repaired_frames} of {self._plan.frames} frames cannot be repaired")
            self._repaired_frames = message.repaired_frames
            self._note_ages(message.ages, heard_ns)
            self._buffer = buffer_for(message.chunk, list(TORCH_DTYPES), self._shape)
        elif message.HasField("kept"):
            raise PeerContract(f"item {self._index} says what was kept in a later piece than its first")
        add_chunk(self._buffer, message.chunk)

    def item(self) -> MediaItem:
        """The complete item, on the host. Reads and converts all of its embeddings, so call it beside the loop."""
        assert self._buffer is not None
        with busy("transfer"):
            sent = torch.frombuffer(self._buffer.data, dtype=TORCH_DTYPES[self._buffer.dtype]).view(self._shape)
            # Checked after converting: what is finite in float32 may be too large for float16.
            embeds = sent.to(self._dtype)
            kept = b"" if self._kept is None else self._kept.tobytes()
            digest = tagged_digest(_DOMAIN, (self._buffer.dtype.label.encode(), kept, self._buffer.data))
            if not bool(embeds.isfinite().all()):
                raise PeerContract(f"the embeddings of item {self._index} are not finite in {self._dtype}")
            embeds = pinned_for(embeds, self._device)
        return MediaItem(self._index, self._kept, embeds, self._repaired_frames, digest)

    def _note_ages(self, ages: encoder_pb2.StageAges, heard_ns: int) -> None:
        told = {
            Stage.WAIT_FOR_ENCODER: ages.begun_s,
            Stage.ENCODE: ages.encoded_s,
            Stage.PRUNE: ages.pruned_s,
        }
        if ages.HasField("decoded_s"):
            told[Stage.DECODE] = ages.decoded_s
        if ages.HasField("resized_s"):
            told[Stage.RESIZE] = ages.resized_s
        self.left_ns = {stage: from_ago_s(ago_s, heard_ns) for stage, ago_s in told.items()}

    def _checked_kept(self, message: encoder_pb2.EmbedsChunk) -> Int32Array | None:
        count, tokens = self._shape[1], self._plan.grid.tokens
        if message.HasField("kept") != (count < tokens):
            raise PeerContract(
                f"item {self._index} keeps {count} of {tokens} tokens; which ones is said where some are dropped, and "
                f"nowhere else"
            )
        if count == tokens:
            return None
        kept = int32_array(message.kept)
        if kept.shape != (count,):
            raise PeerContract(f"item {self._index} must keep {count} tokens, got kept of shape {list(kept.shape)}")
        if kept[0] < 0 or kept[-1] >= tokens or bool((np.diff(kept) <= 0).any()):
            raise PeerContract(f"item {self._index}'s kept must increase strictly from 0 or more to below {tokens}")
        return kept
