"""Chooses tokens of a video before the vision tower, and cuts their pixels out of the frames.

    slices as they are decoded      0       1       2       3       4
    changes                         new   change  change  change  change
    a threshold alone               sent    sent    sent    sent    sent            each by itself
    a number of tokens              sent    held    held    held    held ─▶ ranked ─▶ sent

A token is a square of pixels, so this is for families whose tokens are places. It knows neither files nor gRPC.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from time import monotonic_ns

import numpy as np

from framesieve.common.contract.errors import InvalidRequest
from framesieve.common.contract.plan import Int32Array, MediaPlan, Modality
from framesieve.common.contract.retention import (
    AUTO_THRESHOLD,
    BEFORE_TOWER,
    Pruning,
    chosen_before_tower,
    num_kept,
)
from framesieve.common.sealed_memory import SealedMemory
from framesieve.services.preprocessing.pruning.change import block_means, change
from framesieve.services.preprocessing.pruning.pixel_change import changed, keep
from framesieve.services.preprocessing.video.resize import Float32Array, FrameArray
from framesieve.services.preprocessing.video.slices import Slice

_NONE: Int32Array = np.empty(0, np.int32)


def choice_of(pruning: Pruning, plan: MediaPlan, shares: bool = False) -> Choice | None:
    """How the tokens of an item are chosen; None: its frames are sent whole, because none of its tokens are dropped.
    shares: as `Choice` has it.

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
    return Choice(plan, pruning, shares) if chosen_before_tower(plan.grid, pruning, plan.modality) else None


class Choice:
    """Chooses the tokens of one video, whose slices come in order.

    shares: makes the pixels in memory that can be handed over.
    first: the first slice whose tokens may be kept. held_bytes: of the slices that it holds at most.
    """

    def __init__(self, plan: MediaPlan, pruning: Pruning, shares: bool = False) -> None:
        height, width = plan.frames.size_px
        self._grid = plan.grid
        self._side = height // plan.grid.h
        self._slice_frames, self._dtype = plan.slice_frames, plan.frames.dtype.label
        self._threshold = AUTO_THRESHOLD if pruning.threshold is None else pruning.threshold
        self._count = num_kept(plan.grid, pruning)
        self._bounded = pruning.threshold is not None
        self.first = pruning.first_slice
        self._at_once = self._bounded and self._count == plan.grid.tokens - self.first * plan.grid.slice_tokens
        self._shares = shares
        self._means: Int32Array | None = None
        self._changes: list[Float32Array] = []
        self._held: list[Slice] = []
        frame_bytes = 3 * plan.frames.dtype.itemsize * height * width
        self.held_bytes = 0 if self._at_once else plan.frames.count * frame_bytes

    @property
    def last_means(self) -> Int32Array | None:
        """Of the last slice, as `block_means` returns them; None before it."""
        return self._means if len(self._changes) == self._grid.t else None

    def skip(self, means: Int32Array) -> Iterator[Slice]:
        """The slices before the first one whose tokens may be kept, undecoded. means: of the last of them."""
        frames, now_ns = self._slice_frames, monotonic_ns()
        nothing = np.empty((frames, 0, self._side, 3), self._dtype)
        self._means = means
        for number in range(self.first):
            self._changes.append(np.empty(0, np.float32))
            yield Slice(number * frames, nothing, 0, 0.0, 0.0, now_ns, now_ns, kept=_NONE)

    def add(self, whole: Slice) -> Slice | None:
        """Takes the next slice. Returns its chosen tokens, [F, k · side, side, 3]; None: `rest` will."""
        before, self._means = self._means, block_means(whole.pixels, self._side)
        new = np.full(self._grid.slice_tokens, np.inf, np.float32)
        changes = new if before is None else change(self._means, before)
        number = len(self._changes)
        self._changes.append(changes)
        if number < self.first:
            return self._cut(whole, _NONE)
        if number and not self._at_once:
            self._held.append(whole)
            return None
        return self._cut(whole, changed(changes, number, self._threshold))

    def rest(self) -> Iterator[Slice]:
        """The chosen tokens of the slices that it holds, once it has all slices."""
        if not self._held:
            return
        count = self._count
        if self._bounded:
            all_changed = (changed(each, number, self._threshold) for number, each in enumerate(self._changes))
            count = min(count, sum(each.size for each in all_changed))
        kept = keep(np.concatenate(self._changes), self._grid, count, self._threshold)
        ends = np.searchsorted(kept, self._grid.slice_tokens * np.arange(1, self._grid.t + 1))
        held, self._held = self._held, []
        for number, whole in enumerate(held, 1):
            first = number * self._grid.slice_tokens
            yield self._cut(whole, kept[ends[number - 1] : ends[number]] - np.int32(first))

    def _cut(self, whole: Slice, kept: Int32Array) -> Slice:
        pixels = cut(whole.pixels, kept, self._side)
        memory = None
        if self._shares and kept.size:
            with suppress(OSError):  # the machine lacks descriptors or memory
                memory = SealedMemory()
                memory.write(pixels.data)
                memory.seal()
        return replace(whole, pixels=pixels, memory=memory, kept=kept)


def cut(pixels: FrameArray, kept: Int32Array, side: int) -> FrameArray:
    """The squares of the kept tokens, one below the other: [F, H, W, 3] to [F, k · side, side, 3].

    kept: int32 [k], indices of tokens, row by row.
    """
    frames, height, width, channels = pixels.shape
    squares = pixels.reshape(frames, height // side, side, width // side, side, channels).transpose(0, 1, 3, 2, 4, 5)
    rows, columns = np.divmod(kept, width // side)
    return squares[:, rows, columns].reshape(frames, len(kept) * side, side, channels)
