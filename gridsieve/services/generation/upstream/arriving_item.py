"""Assembles a media item from the pieces that the encoder sends, and checks each against the plan.

    progress, progress, …                      never falls, never repeats
    first piece: kept, ages ─▶ pieces ─▶ whole ─▶ converted to the model's dtype, finite, pinned for CUDA
    in parts:    the same for each part, which is then copied into room for the whole item

    slices:      [0 .. 3)[3 .. 7) lost         an encoder is lost: what it has sent stays,
                 [0 ....... 5)[5 ..... 12)     and of another one's parts the slices from 7 on are taken

Slices of two encoders differ in rounding, so such an item has a name of its own.
Violations raise PeerContract. This module does not know calls.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gridsieve.common.contract.errors import PeerContract
from gridsieve.common.contract.plan import DIGEST_BYTES, Int32Array, MediaPlan, tagged_digest
from gridsieve.common.contract.received import received_kept, received_part
from gridsieve.common.contract.tensors import TensorBuffer
from gridsieve.common.contract.wire import Take, add_chunk, buffer_for, from_ago_s
from gridsieve.common.telemetry.metrics import busy
from gridsieve.services.compute.device import TORCH_DTYPES
from gridsieve.services.compute.transfers import pinned_for
from gridsieve.services.generation.request.encoded_media import MediaItem
from gridsieve.services.generation.stage_clock import Stage
from gridsieve.v1 import encoder_pb2

_DIGEST_DOMAIN = b"gridsieve media item v4"


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

    count: how many of its tokens are kept. least: if fewer may be, how many at least. reference_bytes: of the reference
    that must come with it.
    """

    def __init__(
        self,
        index: int,
        plan: MediaPlan,
        count: int,
        model: ModelInput,
        least: int | None = None,
        reference_bytes: int = 0,
    ) -> None:
        self._index = index
        self._plan = plan
        self._model = model
        self._shape = (1 + model.embed_levels, count, model.hidden_size)
        self._bound = least
        self._least = count if least is None else least
        self._buffer: TensorBuffer | None = None  # of the part that arrives, or arrived last
        self._part: Int32Array = np.empty(0, np.int32)  # its kept tokens
        self._end = 0  # the slice after it
        self._rows = 0  # of this part and those before it
        self._taken = 0  # slices of the parts that `finish` has taken, from this encoder or one before it
        self._taken_rows = 0  # of these slices
        self._kept: Int32Array = np.empty(0, np.int32)  # of these slices, with room for the whole item, as `_embeds`
        self._embeds: Tensor | None = None
        self._digest = b""
        self._repaired_frames = 0
        self._reference_bytes, self._reference = reference_bytes, b""
        self._progress = Progress(index, 0, 0)
        self.left_ns: dict[Stage, int] = {}  # when the item left each of its stages; empty before the last part

    def resumed(self) -> ArrivingItem:
        """The same item, sent again by another encoder. The slices that were taken stay as they are."""
        count, room = self._shape[1], self._reference_bytes
        again = ArrivingItem(self._index, self._plan, count, self._model, self._bound, room)
        again._taken, again._taken_rows = self._taken, self._taken_rows
        again._kept, again._embeds = self._kept, self._embeds
        return again

    @property
    def begun(self) -> bool:
        """Whether the last part has begun."""
        return bool(self.left_ns)

    @property
    def part_complete(self) -> bool:
        return self._buffer is not None and self._buffer.complete

    @property
    def complete(self) -> bool:
        return self.part_complete and self._end == self._plan.grid.t

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

    def take_piece(self, message: encoder_pb2.EmbedsChunk, received_ns: int, take: Take | None = None) -> None:
        """received_ns: when the piece was read, on the clock of `left_ns`. take: see `buffer_for`."""
        if self.complete:
            raise PeerContract(f"item {self._index} was sent twice")
        if self._buffer is None or self._buffer.complete:
            self._buffer = self._begin(message, received_ns, take)
        elif message.HasField("kept") or message.HasField("slices"):
            raise PeerContract(f"item {self._index}: only the first piece may have kept and slices")
        add_chunk(self._buffer, message.chunk)

    def finish(self) -> MediaItem | None:
        """What has arrived, once a part is complete, in the model's dtype, in pinned memory for CUDA.

        None if all slices of the part were there before. Reads the part's embeddings: call it in a thread.
        """
        assert self._buffer is not None
        with busy("transfer"):
            if self._taken or self._end < self._plan.grid.t:
                return self._add_part(self._buffer)
            kept = None if self._part.size == self._plan.grid.tokens else self._part
            return self._item(kept, pinned_for(self._received(self._buffer), self._model.device))

    def _begin(self, first: encoder_pb2.EmbedsChunk, received_ns: int, take: Take | None) -> TensorBuffer:
        """A buffer for the part that a message begins."""
        grid, start = self._plan.grid, self._end
        levels, count, width = self._shape
        if first.HasField("slices") or start:
            self._end, self._part = received_part(first, grid, start)
            self._rows += self._part.size
            least = self._least if self._end == grid.t else 0
            if not least <= self._rows <= count:
                raise PeerContract(f"{self._end} of {grid.t} slices of item {self._index} keep {self._rows} tokens")
        else:
            kept = received_kept(first, grid, count, self._bound)
            self._end, self._part = grid.t, np.arange(grid.tokens, dtype=np.int32) if kept is None else kept
        if self._end == grid.t:
            if not 0 <= first.repaired_frames <= self._plan.frames.count:
                raise PeerContract(
                    f"item {self._index}: repaired_frames must be between 0 and {self._plan.frames.count}, "
                    f"got {first.repaired_frames}"
                )
            if len(first.reference) != self._reference_bytes:
                raise PeerContract(
                    f"item {self._index}: reference must have {self._reference_bytes} bytes, got {len(first.reference)}"
                )
            self._repaired_frames, self._reference = first.repaired_frames, first.reference
            self._note_ages(first.ages, received_ns)
        dtypes = list(TORCH_DTYPES) if self._buffer is None else [self._buffer.dtype]
        buffer = buffer_for(first.chunk, dtypes, (levels, self._part.size, width), take)
        if not start:
            if len(first.encoding) not in (0, DIGEST_BYTES):
                raise PeerContract(f"item {self._index}: encoding must have {DIGEST_BYTES} bytes, if any")
            encoding = b"" if self._taken else first.encoding
            name = encoding or secrets.token_bytes(DIGEST_BYTES)
            self._digest = tagged_digest(_DIGEST_DOMAIN, (buffer.dtype.label.encode(), name))
        return buffer

    def _add_part(self, buffer: TensorBuffer) -> MediaItem | None:
        """Copies what is new of a part behind the parts before it."""
        grid, (levels, count, width), kept = self._plan.grid, self._shape, self._part
        embeds = self._received(buffer)
        if self._end <= self._taken:
            return None
        known = int(np.searchsorted(kept, self._taken * grid.slice_tokens))
        at = self._taken_rows
        end = at + kept.size - known
        if end > count or (self._end == grid.t and end < self._least):
            raise PeerContract(f"two encoders keep {end} tokens of item {self._index}, which keeps {count}")
        if self._embeds is None:
            pinned = self._model.device.type == "cuda"
            self._kept = np.empty(count, np.int32)
            self._embeds = torch.empty((levels, count, width), dtype=self._model.dtype, pin_memory=pinned)
        self._embeds[:, at:end] = embeds[:, known:]
        self._kept[at:end] = kept[known:]
        self._taken, self._taken_rows = self._end, end
        tokens, arrived = self._end * grid.slice_tokens, self._kept[:end]
        whole = None if arrived.size == tokens else arrived
        if self._end < grid.t:
            return MediaItem(self._index, whole, self._embeds, 0, self._digest, tokens)
        return self._item(whole, self._embeds[:, :end])

    def _item(self, kept: Int32Array | None, embeds: Tensor) -> MediaItem:
        repaired, reference = self._repaired_frames, self._reference
        return MediaItem(self._index, kept, embeds, repaired, self._digest, reference=reference)

    def _received(self, buffer: TensorBuffer) -> Tensor:
        """A part's embeddings in the model's dtype. Raises PeerContract if they are not finite in it."""
        if not buffer.data.nbytes:
            return torch.empty(buffer.shape, dtype=self._model.dtype)
        sent = torch.frombuffer(buffer.data, dtype=TORCH_DTYPES[buffer.dtype]).view(buffer.shape)
        # Checked after the conversion: finite float32 values can overflow float16.
        embeds = sent.to(self._model.dtype)
        # Both are NaN where any value is.
        if not all(math.isfinite(extreme) for extreme in embeds.aminmax()):
            raise PeerContract(f"the embeddings of item {self._index} are not finite in {self._model.dtype}")
        return embeds

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
