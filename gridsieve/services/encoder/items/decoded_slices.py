"""The decoded slices of a media item: which tokens of the grid are encoded, and where their embeddings are.

    slice         0, whole     1        2, nothing    3
    kept          0 1 2 3      5 7                    12 14 15
    rows          0 1 2 3      4 5                    6  7  8

Where nothing is chosen before the tower, every slice has all of its tokens. It knows no embeddings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from gridsieve.common.contract.errors import PeerContract
from gridsieve.common.contract.plan import Int32Array, MediaPlan, Modality
from gridsieve.common.contract.retention import ItemPruning, num_kept
from gridsieve.common.contract.tensors import TensorBuffer
from gridsieve.services.encoder.tower.tower import Arrangement

# All that determines the embeddings of a slice, in one tower: the digest of its frames and kept tokens, the rows and
# columns of its grid, the numbers of the frames' times where the tower takes them, and the adapter's digest, if any.
SliceKey: TypeAlias = tuple[bytes, int, int, tuple[int, ...], bytes]


@dataclass(frozen=True, slots=True)
class FrameSlice:
    """One of `MediaPlan.slices` of an item.

    index: its place among them.
    frames: [frames, height, width, channels], of the dtype that the plan names; None: it repeats an earlier slice.
    decoded_ns, resized_ns: when its last frame left these stages, on this host's monotonic clock.
    kept: the tokens whose squares the frames are, one below the other, int32 [k], increasing; None: all of them.
    digest: of frames and kept; empty: not known.
    repeats: the index of an earlier slice of the item that has the same frames and kept tokens; None: it is new.
    reference: of the last slice, what was last shown of each place, if the item was selected with a reference.
    """

    index: int
    frames: TensorBuffer | None
    repaired_frames: int
    decoded_ns: int
    resized_ns: int
    kept: Int32Array | None = None
    digest: bytes = b""
    repeats: int | None = None
    reference: bytes = b""


class DecodedSlices:
    """The slices of an item from the first one on.

    tokens: how many are encoded, at most, until the last slice is there. rows: of each slice, in the embeddings.
    keys: of each slice; None: it is not found by others. reference: as the last slice brings it.
    """

    def __init__(
        self, plan: MediaPlan, arrangement: Arrangement, chosen: ItemPruning | None, adapter: bytes = b""
    ) -> None:
        """chosen: how tokens are chosen before the tower; None: all are encoded. adapter: digest of the adapter
        that the tower computes with; empty: none."""
        self.tokens = num_encoded(plan, chosen)
        self.rows: list[slice] = []
        self.keys: list[SliceKey | None] = []
        self.reference = b""
        self._kept: list[Int32Array] = []
        self._plan = plan
        self._arrangement = arrangement
        self._chosen = chosen
        self._adapter = adapter

    def append(self, arrived: FrameSlice) -> slice:
        """Adds the next slice and returns its rows. Raises PeerContract for more or fewer tokens than are chosen."""
        assert arrived.index == len(self.rows)
        start = self.rows_before(arrived.index)
        kept = self._kept_in(arrived)
        end = self._arrangement.tokens_before(arrived.index + 1) if kept is None else start + kept.size
        if kept is not None:
            self._check(end, last=arrived.index + 1 == self._plan.slices)
            self._kept.append(kept)
        self.rows.append(slice(start, end))
        self.keys.append(self._key_of(arrived))
        self.reference = arrived.reference
        return self.rows[-1]

    def rows_before(self, index: int) -> int:
        """How many tokens are encoded of the slices before this one."""
        return self.rows[index - 1].stop if index else 0

    def kept(self, start: int, end: int) -> Int32Array | None:
        """The tokens of the grid that are encoded of slices [start, end), int32 (n,), increasing; None: all of them."""
        if self._chosen is None:
            return None
        tokens = self.rows_before(end) - self.rows_before(start)
        return None if tokens == (end - start) * self._plan.grid.slice_tokens else np.concatenate(self._kept[start:end])

    def times_of(self, index: int) -> tuple[int, ...]:
        """The numbers of the times of a slice's frames; empty if the tower takes none."""
        first = index * self._plan.slice_frames
        return self._arrangement.times[first : first + self._plan.slice_frames]

    def _kept_in(self, arrived: FrameSlice) -> Int32Array | None:
        """The tokens of the grid that a slice keeps, int32 [k]; None: all of its own."""
        if self._chosen and arrived.repeats is not None:
            return self._kept[arrived.repeats] + np.int32(
                (arrived.index - arrived.repeats) * self._plan.grid.slice_tokens
            )
        return None if arrived.kept is None else arrived.kept + np.int32(arrived.index * self._plan.grid.slice_tokens)

    def _check(self, tokens: int, last: bool) -> None:
        """tokens: how many are chosen so far; after the last slice they are as many as are encoded."""
        assert self._chosen is not None
        exact = self._chosen.threshold is None
        least = self.tokens if exact else 0 if self._chosen.first_slice else 1
        if tokens > self.tokens or (last and tokens < least):
            bound = "" if exact else "at most "
            raise PeerContract(f"{tokens} tokens were chosen of a video that keeps {bound}{self.tokens}")
        if last:
            self.tokens = tokens

    def _key_of(self, arrived: FrameSlice) -> SliceKey | None:
        """The key of a slice; None for an image's, whose tiles may be arranged, for a sound, and where the digest is
        not known."""
        if arrived.repeats is not None:
            return self.keys[arrived.repeats]
        if not arrived.digest or self._plan.modality is not Modality.VIDEO:
            return None
        return arrived.digest, self._plan.grid.h, self._plan.grid.w, self.times_of(arrived.index), self._adapter


def num_encoded(plan: MediaPlan, chosen: ItemPruning | None) -> int:
    """How many tokens of an item are encoded, at most. chosen: how they are chosen before the tower; None: all are."""
    return plan.grid.tokens if chosen is None else num_kept(plan.grid, chosen)
