"""Chooses tokens of a video before the vision tower, slice by slice, and cuts their pixels out of the frames.

    slice 0   [ . . . . . . ]   whole
    slice 1   [ . . . . . . ]   scored against slice 0 ─▶ its best tokens ─▶ their squares, one below the other
    slice 2   ...               scored against slice 1

A token is a square of pixels, so this is for families whose tokens are places. It knows neither files nor gRPC.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import numpy as np

from framesieve.common.contract.errors import InvalidRequest
from framesieve.common.contract.plan import Int32Array, MediaPlan, Modality
from framesieve.common.contract.retention import BEFORE_TOWER, Pruning, causal_slice_tokens, chosen_before_tower
from framesieve.common.sealed_memory import SealedMemory
from framesieve.services.preprocessing.pruning.pixel_change import scores
from framesieve.services.preprocessing.video.resize import UInt8Array
from framesieve.services.preprocessing.video.slices import Slice


def choice_of(pruning: Pruning, plan: MediaPlan) -> Choice | None:
    """How the tokens of an item are chosen; None: its frames are sent whole, because none of its tokens are dropped.

    Raises InvalidRequest where tokens would be dropped of an image, after the tower, or of an item whose tokens are not
    squares of its frames.
    """
    if not pruning.drops:
        return None
    if plan.modality is not Modality.VIDEO:
        raise InvalidRequest("is for videos, the selected item is an image", field="pruning")
    if pruning.method not in BEFORE_TOWER:
        raise InvalidRequest(field="pruning.method", limit=f"one of {', '.join(BEFORE_TOWER)}", value=pruning.method)
    height, width = plan.frames.size_px
    side = height // plan.grid.h
    if not plan.frames.count or plan.frames.group_frames or (side * plan.grid.h, side * plan.grid.w) != (height, width):
        text = f"is for tokens that are squares of frames, got the grid {plan.grid} and {height}×{width} pixels"
        raise InvalidRequest(text, field="pruning.method", value=pruning.method)
    return Choice(plan, pruning) if chosen_before_tower(plan.grid, pruning, plan.modality) else None


class Choice:
    """Chooses the tokens of one video. Slices come in order."""

    def __init__(self, plan: MediaPlan, pruning: Pruning) -> None:
        self._grid = plan.grid
        self._side = plan.frames.size_px[0] // plan.grid.h
        self._count = causal_slice_tokens(plan.grid, pruning.rate)
        self._threshold = 0.0 if pruning.threshold is None else pruning.threshold
        self._before: UInt8Array | None = None

    def of(self, whole: Slice, share: bool) -> Slice:
        """The chosen tokens of the next slice, [F, k · side, side, 3]. share: in memory for handing over, too."""
        kept = self._kept(whole.pixels)
        pixels = cut(whole.pixels, kept, self._side)
        memory = None
        if share and kept.size:
            with suppress(OSError):  # the machine lacks descriptors or memory
                memory = SealedMemory()
                memory.write(pixels.data)
                memory.seal()
        return replace(whole, pixels=pixels, memory=memory, kept=kept)

    def _kept(self, pixels: UInt8Array) -> Int32Array:
        before, self._before = self._before, pixels
        if before is None:
            return np.arange(self._grid.slice_tokens, dtype=np.int32)
        found = scores(before, pixels, self._side)
        best = np.argsort(-found, kind="stable")[: self._count]
        return np.sort(best[found[best] >= self._threshold]).astype(np.int32)


def cut(pixels: UInt8Array, kept: Int32Array, side: int) -> UInt8Array:
    """The squares of the kept tokens, one below the other: [F, H, W, 3] to [F, k · side, side, 3].

    kept: int32 [k], indices of tokens, row by row.
    """
    frames, height, width, channels = pixels.shape
    squares = pixels.reshape(frames, height // side, side, width // side, side, channels).transpose(0, 1, 3, 2, 4, 5)
    rows, columns = np.divmod(kept, width // side)
    return squares[:, rows, columns].reshape(frames, len(kept) * side, side, channels)
