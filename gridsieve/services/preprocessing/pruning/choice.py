"""Chooses tokens of a video before the vision tower, and cuts their pixels out of the frames.

    slices as they are decoded      0       1       2       3       4
    changes                         new   change  change  change  change
    a threshold alone               sent    sent    sent    sent    sent            each by itself
    a number of tokens              sent    held    held    ·       ·  ─▶ ranked ─▶ sent
    decoded again                                           ·       4

The changes rank the tokens, so pixels are held only as far as there is room. Of the slices whose pixels are not held,
those that keep tokens are decoded again.

A token is a square of pixels, so this is for families whose tokens are places. It knows neither files nor gRPC.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from time import monotonic_ns

import numpy as np

from gridsieve.common.contract.errors import InvalidRequest
from gridsieve.common.contract.plan import Int32Array, MediaPlan, Modality
from gridsieve.common.contract.retention import (
    AUTO_THRESHOLD,
    BEFORE_TOWER,
    ItemPruning,
    chosen_before_tower,
    num_kept,
)
from gridsieve.common.sealed_memory import SealedMemory
from gridsieve.services.preprocessing.pruning.change import block_means, change
from gridsieve.services.preprocessing.pruning.pixel_change import changed, keep
from gridsieve.services.preprocessing.pruning.reference import Reference
from gridsieve.services.preprocessing.video.resize import Float32Array, FrameArray
from gridsieve.services.preprocessing.video.slices import Slice

_NONE: Int32Array = np.empty(0, np.int32)


def choice_of(pruning: ItemPruning, plan: MediaPlan, shares: bool = False) -> TokenChoice | None:
    """How the tokens of an item are chosen; None: its frames are sent whole, because none of its tokens are dropped.
    shares: as `TokenChoice` has it.

    Raises InvalidRequest where tokens would be dropped of an image, after the tower, or of an item whose tokens are not
    squares of its frames.
    """
    if not pruning.drops:
        return None
    if plan.modality is not Modality.VIDEO:
        what = "an image" if plan.modality is Modality.IMAGE else "a sound"
        raise InvalidRequest(f"is for videos, the selected item is {what}", field="pruning")
    if pruning.method not in BEFORE_TOWER:
        raise InvalidRequest(field="pruning.method", limit=f"one of {', '.join(BEFORE_TOWER)}", value=pruning.method)
    height, width = plan.frames.size_px
    side = height // plan.grid.h
    if not plan.frames.count or plan.frames.group_frames or (side * plan.grid.h, side * plan.grid.w) != (height, width):
        text = f"is for tokens that are squares of frames, got the grid {plan.grid} and {height}×{width} pixels"
        raise InvalidRequest(text, field="pruning.method", value=pruning.method)
    return TokenChoice(plan, pruning, shares) if chosen_before_tower(plan.grid, pruning, plan.modality) else None


class TokenChoice:
    """Chooses the tokens of one video, whose slices come in order.

    shares: makes the pixels in memory that can be handed over.
    first: slices before this one keep no token. If it is above 0, the slices from it on are compared with a reference,
        and none is sent whole to renew what was shown.
    slice_bytes: of a whole slice, at most.
    """

    def __init__(self, plan: MediaPlan, pruning: ItemPruning, shares: bool = False) -> None:
        height, width = plan.frames.size_px
        self._grid = plan.grid
        self._side = height // plan.grid.h
        self._slice_frames, self._dtype = plan.slice_frames, plan.frames.dtype.label
        self._threshold = AUTO_THRESHOLD if pruning.threshold is None else pruning.threshold
        self._count = num_kept(plan.grid, pruning)
        self._bounded = pruning.threshold is not None
        self.first = pruning.first_slice
        self._at_once = self._bounded and self._count == plan.grid.tokens
        self._reference = Reference.read(pruning.reference, plan.grid) if pruning.reference else None
        self._shares = shares
        self._means: Int32Array | None = None
        self._changes: list[Float32Array] = []
        self._repaired = False
        self._deferred: deque[Slice] = deque()
        self._kept: list[Int32Array] = []  # of each deferred slice
        self._again: Sequence[int] = ()
        self.slice_bytes = 3 * plan.slice_frames * plan.frames.dtype.itemsize * height * width

    @property
    def defers(self) -> bool:
        """Whether the tokens of the next slice are chosen after the last one."""
        return bool(self._changes) and not self._at_once

    def skip(self) -> list[Slice]:
        """The slices that need not be decoded: those before the first one whose tokens may be kept, if it is compared
        with a reference."""
        frames, now_ns = self._slice_frames, monotonic_ns()
        nothing = np.empty((frames, 0, self._side, 3), self._dtype)
        numbers = range(self.first if self._reference else 0)
        return [Slice(number * frames, nothing, 0, 0.0, 0.0, now_ns, now_ns, kept=_NONE) for number in numbers]

    def take(self, whole: Slice, holds: bool) -> Slice | None:
        """Takes the next slice. Returns its chosen tokens, [F, k · side, side, 3]; None: `rest` will.

        holds: whether the pixels of a deferred slice may be held until then.
        """
        if self.first:
            return self._compare(whole)
        defers = self.defers
        self._repaired |= whole.repaired_frames > 0
        before, self._means = self._means, block_means(whole.pixels, self._side)
        new = np.full(self._grid.slice_tokens, np.inf, np.float32)
        changes = new if before is None else change(self._means, before)
        number = len(self._changes)
        self._changes.append(changes)
        if defers:
            self._deferred.append(replace(whole, memory=None) if holds else self._cut(whole, _NONE))
            return None
        return self._cut(whole, changed(changes, number, self._threshold))

    def _compare(self, whole: Slice) -> Slice:
        """What must be shown of a slice; nothing of those before `first`, the last of which is the reference."""
        number, means = whole.first_frame // self._slice_frames, block_means(whole.pixels, self._side)
        kept = _NONE
        if number < self.first or self._reference is None:
            self._reference = Reference.of(means)
        else:
            kept, self._reference = self._reference.next(means, self._threshold)
        last = number + 1 == self._grid.t
        return replace(self._cut(whole, kept), reference=self._reference.written() if last else b"")

    def choose(self) -> Sequence[int]:
        """Chooses the tokens of the deferred slices, once all slices were taken.

        Returns the numbers of the slices to be decoded again for `rest`: those that keep tokens and whose pixels are
        not held. All of a video with repaired frames, because what replaces these depends on the frames around them.
        """
        if not self._deferred:
            return ()
        count = self._count
        if self._bounded:
            all_changed = (changed(each, number, self._threshold) for number, each in enumerate(self._changes))
            count = min(count, sum(each.size for each in all_changed))
        kept = keep(np.concatenate(self._changes), self._grid, count, self._threshold)
        tokens = self._grid.slice_tokens
        _, *self._kept = np.split(kept % tokens, np.searchsorted(kept, tokens * np.arange(1, self._grid.t)))
        deferred = enumerate(zip(self._deferred, self._kept, strict=True), 1)
        lacking = [number for number, (each, own) in deferred if own.size and not each.pixels.size]
        self._again = range(self._grid.t) if lacking and self._repaired else lacking
        return self._again

    def rest(self, again: Slice | None = None) -> Iterator[Slice]:
        """The chosen tokens of the next deferred slices, up to one whose pixels it lacks.

        again: the next slice that was decoded again, from a video of these alone.
        """
        first_frame = again and self._slice_frames * self._again[again.first_frame // self._slice_frames]
        while self._deferred:
            whole, kept = self._deferred[0], self._kept[-len(self._deferred)]
            if kept.size and not whole.pixels.size:
                if again is None or first_frame != whole.first_frame:
                    return
                whole = replace(again, first_frame=first_frame)
            self._deferred.popleft()
            yield self._cut(whole, kept)

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
