"""Planned media as what is sent: temporal slices of resized frames, made one at a time.

It joins decoding and resizing, and measures how long each took. Who runs it, and how far ahead, is told in `workers`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from services.preprocessing.decode import DecodedFrame, decode_frames
from services.preprocessing.packets import PacketIndex
from services.preprocessing.pictures import Picture, decode_picture
from services.preprocessing.resize import UInt8Array, resize
from services.preprocessing.sources import Source


@dataclass(frozen=True, slots=True, eq=False)
class Slice:
    """One temporal slice: its first frame's index within the item, and its frames, uint8 [frames, H, W, 3], RGB.

    repaired_frames: how many of them could not be decoded and repeat the one before.
    """

    first_frame: int
    pixels: UInt8Array
    repaired_frames: int
    decode_s: float
    resize_s: float


@dataclass(frozen=True, slots=True)
class PlannedPicture:
    """A picture, and the size at which it is sent."""

    source: Source
    picture: Picture
    height_px: int
    width_px: int

    def slices(self) -> Generator[Slice, None, None]:
        """The one slice. Raises MediaDamaged if the picture cannot be decoded."""
        start = time.perf_counter()
        pixels = decode_picture(self.source, self.picture)
        decoded = time.perf_counter()
        resized = resize(pixels, self.height_px, self.width_px)
        yield Slice(0, np.ascontiguousarray(resized[None]), 0, decoded - start, time.perf_counter() - decoded)


@dataclass(frozen=True, slots=True)
class PlannedVideo:
    """A video, the places of the frames that are sent, `slice_frames` at a time, and their size."""

    source: Source
    index: PacketIndex
    places: tuple[int, ...]
    slice_frames: int
    height_px: int
    width_px: int

    def slices(self, max_pixels: float = math.inf) -> Generator[Slice, None, None]:
        """Slices in order. max_pixels, and what it raises: as `decode_frames` has them."""
        with closing(decode_frames(self.source, self.index, self.places, max_pixels)) as frames:
            for first in range(0, len(self.places), self.slice_frames):
                yield self._slice(first, frames)

    def _slice(self, first: int, frames: Iterator[DecodedFrame]) -> Slice:
        pixels = np.empty((self.slice_frames, self.height_px, self.width_px, 3), np.uint8)
        repaired, decode_s, resize_s = 0, 0.0, 0.0
        for row in pixels:
            start = time.perf_counter()
            frame = next(frames)
            decoded = time.perf_counter()
            row[:] = resize(frame.pixels, self.height_px, self.width_px)
            decode_s += decoded - start
            resize_s += time.perf_counter() - decoded
            repaired += frame.repaired
        return Slice(first, pixels, repaired, decode_s, resize_s)


@dataclass(frozen=True, slots=True)
class PlannedEmbeds:
    """Media whose embeddings came with the prompt: no frame is sent."""

    height_px: ClassVar[int] = 0
    width_px: ClassVar[int] = 0

    def slices(self) -> Generator[Slice, None, None]:
        """None."""
        yield from ()


PlannedMedia = PlannedPicture | PlannedVideo | PlannedEmbeds
