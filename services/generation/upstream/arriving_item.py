"""Assembles a media item from the pieces that the encoder sends, and checks each against the plan.

    progress, progress, …                      never falls, never repeats
    first piece: kept, ages ─▶ pieces ─▶ whole ─▶ converted to the model's dtype, finite, pinned for CUDA

Violations raise PeerContract. This module does not know calls and sessions.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass

import torch

from framesieve.common.contract.errors import PeerContract
from framesieve.common.contract.plan import DIGEST_BYTES, Int32Array, MediaPlan, tagged_digest
from framesieve.common.contract.received import received_kept
from framesieve.common.contract.tensors import TensorBuffer
from framesieve.common.contract.wire import Take, add_chunk, buffer_for, from_ago_s
from framesieve.common.telemetry.metrics import busy
from framesieve.services.compute.device import TORCH_DTYPES
from framesieve.services.compute.transfers import pinned_for
from framesieve.services.generation.request.encoded_media import MediaItem
from framesieve.services.generation.stage_clock import Stage
from framesieve.v1 import encoder_pb2

_DIGEST_DOMAIN = b"framesieve media item v3"


@dataclass(frozen=True, slots=True)
class ModelInput:
    """What the language model takes, and peers therefore must send.

    fingerprint: of its checkpoint. embed_levels: deepstack tensors beside a media token's embedding. dtype, device: of
    its weights.
    """

    fingerprint: bytes
    vocab_size: int
    hidden_size: int
    embed_levels: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class Progress:
    """How much of a media item is decoded and encoded, in temporal slices of a video or frames of an image."""

    media_index: int
    decoded_slices: int
    encoded_slices: int


class ArrivingItem:
    """Assembles one media item from its pieces. Raises PeerContract for a piece that contradicts the plan.

    count: how many of its tokens are kept. bounded: fewer may be.
    """

    def __init__(self, index: int, plan: MediaPlan, count: int, model: ModelInput, *, bounded: bool = False) -> None:
        self._index = index
        self._plan = plan
        self._shape = (1 + model.embed_levels, count, model.hidden_size)
        self._bounded = bounded
        self._dtype = model.dtype
        self._device = model.device
        self._buffer: TensorBuffer | None = None
        self._kept: Int32Array | None = None
        self._encoding = b""
        self._repaired_frames = 0
        self._progress = Progress(index, 0, 0)
        self.left_ns: dict[Stage, int] = {}  # when the item left each of its stages; empty until the first piece

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
        # A repeated message is refused as well: a peer could send it for ever.
        if falls or reached == last or not encoded <= decoded <= self._plan.slices:
            raise PeerContract(
                f"progress of item {self._index} ({self._plan.slices} slices) went from {last.decoded_slices} decoded "
                f"and {last.encoded_slices} encoded slices to {decoded} and {encoded}"
            )
        self._progress = reached
        return reached

    def add(self, message: encoder_pb2.EmbedsChunk, received_ns: int, take: Take | None = None) -> None:
        """Adds a piece. received_ns: when it was read, on the clock of `left_ns`. take: see `buffer_for`."""
        if self.complete:
            raise PeerContract(f"item {self._index} was sent twice")
        if self._buffer is None:
            levels, count, width = self._shape
            self._kept = received_kept(message, self._plan.grid, count, self._bounded)
            self._shape = (levels, count if self._kept is None else self._kept.size, width)
            if not 0 <= message.repaired_frames <= self._plan.frames.count:
                raise PeerContract(
                    f"item {self._index}: repaired_frames must be between 0 and {self._plan.frames.count}, "
                    f"got {message.repaired_frames}"
                )
            self._repaired_frames = message.repaired_frames
            self._note_ages(message.ages, received_ns)
            if len(message.encoding) not in (0, DIGEST_BYTES):
                raise PeerContract(f"item {self._index}: encoding must have {DIGEST_BYTES} bytes, if any")
            self._encoding = message.encoding or secrets.token_bytes(DIGEST_BYTES)
            self._buffer = buffer_for(message.chunk, list(TORCH_DTYPES), self._shape, take)
        elif message.HasField("kept"):
            raise PeerContract(f"item {self._index}: only the first piece may have kept")
        add_chunk(self._buffer, message.chunk)

    def finish(self) -> MediaItem:
        """The complete item in the model's dtype, pinned for CUDA. Reads all embeddings: call it in a thread."""
        assert self._buffer is not None
        with busy("transfer"):
            sent = torch.frombuffer(self._buffer.data, dtype=TORCH_DTYPES[self._buffer.dtype]).view(self._shape)
            # Checked after the conversion: finite float32 values can overflow float16.
            embeds = sent.to(self._dtype)
            kept = b"" if self._kept is None else self._kept.tobytes()
            digest = tagged_digest(_DIGEST_DOMAIN, (self._buffer.dtype.label.encode(), kept, self._encoding))
            # Both are NaN where any value is.
            if not all(math.isfinite(extreme) for extreme in embeds.aminmax()):
                raise PeerContract(f"the embeddings of item {self._index} are not finite in {self._dtype}")
            embeds = pinned_for(embeds, self._device)
        return MediaItem(self._index, self._kept, embeds, self._repaired_frames, digest)

    def _note_ages(self, ages: encoder_pb2.StageAges, received_ns: int) -> None:
        reported = {
            Stage.WAIT_FOR_ENCODER: ages.begun_s,
            Stage.ENCODE: ages.encoded_s,
            Stage.PRUNE: ages.pruned_s,
        }
        if ages.HasField("decoded_s"):
            reported[Stage.DECODE] = ages.decoded_s
        if ages.HasField("resized_s"):
            reported[Stage.RESIZE] = ages.resized_s
        self.left_ns = {stage: from_ago_s(ago_s, received_ns) for stage, ago_s in reported.items()}
