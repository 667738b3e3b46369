"""Planned media, and their temporal slices of resized frames, which are made one at a time.

It combines decoding and resizing and measures both. `workers` decides where and when slices are made.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain
from time import monotonic_ns

import numpy as np

from gridsieve.common.contract.plan import Int32Array, SizePx
from gridsieve.common.contract.tensors import DType
from gridsieve.common.sealed_memory import SealedMemory
from gridsieve.services.preprocessing.sources.source import Source
from gridsieve.services.preprocessing.video.card import Card
from gridsieve.services.preprocessing.video.decode import DecodedFrame, decode_frames
from gridsieve.services.preprocessing.video.packets import PacketIndex
from gridsieve.services.preprocessing.video.pictures import PictureIndex, decode_pictures
from gridsieve.services.preprocessing.video.resize import FrameArray, UInt8Array, View, view_into

_NS = 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class Slice:
    """One temporal slice: the index of its first frame in the item, and its frames, [frames, H, W, 3], RGB.

    repaired_frames: number of frames that could not be decoded and repeat the one before.
    decode_s, resize_s: time spent. decoded_ns, resized_ns: when the last frame was done, on the monotonic clock.
    memory: holds the frames, if they can be handed over. kept: the tokens whose squares they are, one below the other,
    int32 [k], increasing; None: they are whole. digest, repeats: see `repeats`, which sets them. reference: of the last
    slice, if it was compared with one: `pruning/reference.py`.
    """

    first_frame: int
    pixels: FrameArray
    repaired_frames: int
    decode_s: float
    resize_s: float
    decoded_ns: int
    resized_ns: int
    memory: SealedMemory | None = None
    kept: Int32Array | None = None
    digest: bytes = b""
    repeats: int | None = None
    reference: bytes = b""


@dataclass(frozen=True, slots=True)
class PlannedVideo:
    """A video, the places of its selected frames, and their height and width as they are sent.

    An image is a video of one frame here.
    index: where the frames are in its file, which may be one of pictures. slice_frames: of each temporal slice, but
        the last may have fewer. views: what each frame shows (None: all); several: each frame is sent as so many
        pictures, of which each is a slice, and all but the first are tiles of `tile_px` (None: of `size_px`). dtype:
        of their values as they are sent.
    """

    source: Source
    index: PacketIndex | PictureIndex
    places: tuple[int, ...]
    slice_frames: int
    size_px: SizePx
    views: tuple[View | None, ...] = (None,)
    tile_px: SizePx | None = None
    dtype: DType = DType.UINT8

    def slice_shape(self, number: int) -> tuple[int, int, int, int]:
        """The shape of slice `number`."""
        frames = min(self.slice_frames, len(self.places) - number // len(self.views) * self.slice_frames)
        return (frames, *(self.tile_px or self.size_px if number % len(self.views) else self.size_px), 3)

    def only(self, numbers: Sequence[int]) -> PlannedVideo:
        """The video of these slices alone, in increasing order; for videos of one view."""
        step = self.slice_frames
        return replace(self, places=tuple(chain.from_iterable(self.places[n * step :][:step] for n in numbers)))

    def slices(
        self,
        progress: Callable[[], None] = lambda: None,
        whole: int = 0,
        repaired: int = 0,
        threads: int = 1,
        card: Card | None = None,
    ) -> Generator[Slice, None, None]:
        """Yields slices in order. The arguments, and exceptions: as in `decode_frames` and `decode_pictures`."""
        resizing = _Resizing(self.views[0])
        with closing(self._frames(progress, whole, repaired, threads, card)) as frames:
            for first in range(0, len(self.places), self.slice_frames):
                if len(self.views) > 1:
                    yield from self._pictures(first * len(self.views), frames)
                else:
                    yield self._slice(first, frames, resizing)

    def _frames(
        self, progress: Callable[[], None], whole: int, repaired: int, threads: int, card: Card | None
    ) -> Generator[DecodedFrame, None, None]:
        if isinstance(self.index, PacketIndex):
            yield from decode_frames(self.source, self.index, self.places, progress, whole, repaired, threads, card)
        else:
            for pixels in decode_pictures(self.source, self.index, self.places, progress):
                yield DecodedFrame(pixels, repaired=False)

    def _pictures(self, first: int, frames: Iterator[DecodedFrame]) -> Iterator[Slice]:
        """The slices of the next frame. It was decoded, and perhaps repaired, for the first of them."""
        start_ns = monotonic_ns()
        frame = next(frames)
        decoded_ns = monotonic_ns()
        made: dict[View, FrameArray] = {}
        for number, view in enumerate(self.views, first):
            begun_ns = monotonic_ns()
            pixels = np.empty(self.slice_shape(number), self.dtype.label)
            view_into(frame.pixels, view, pixels[0], made)
            resized_ns = monotonic_ns()
            repaired, decode_s = (0, 0.0) if number > first else (int(frame.repaired), (decoded_ns - start_ns) * _NS)
            yield Slice(number, pixels, repaired, decode_s, (resized_ns - begun_ns) * _NS, decoded_ns, resized_ns)

    def _slice(self, first: int, frames: Iterator[DecodedFrame], resizing: _Resizing) -> Slice:
        pixels = np.empty(self.slice_shape(first // self.slice_frames), self.dtype.label)
        repaired, decode_ns, resize_ns = 0, 0, 0
        resized_ns = monotonic_ns()
        for row in pixels:
            start_ns = resized_ns
            frame = next(frames)
            decoded_ns = monotonic_ns()
            resizing.into(frame.pixels, row)
            resized_ns = monotonic_ns()
            decode_ns += decoded_ns - start_ns
            resize_ns += resized_ns - decoded_ns
            repaired += frame.repaired
        return Slice(first, pixels, repaired, decode_ns * _NS, resize_ns * _NS, decoded_ns, resized_ns)


class _Resizing:
    """Resizes the frames of a video in order. One that equals the one before, as most of a screen do, is copied."""

    def __init__(self, view: View | None) -> None:
        self._view = view
        self._last: tuple[UInt8Array, FrameArray] | None = None

    def into(self, pixels: UInt8Array, row: FrameArray) -> None:
        """pixels: uint8 [H, W, 3]. row: [height, width, 3] as they are sent, which is written."""
        if self._last and np.array_equal(pixels, self._last[0]):
            row[:] = self._last[1]
        else:
            view_into(pixels, self._view, row, {})
        self._last = pixels, row


@dataclass(frozen=True, slots=True)
class PlannedEmbeds:
    """Media whose embeddings came with the prompt: no frames are sent."""

    def slices(self) -> Generator[Slice, None, None]:
        """Yields nothing."""
        yield from ()
