"""The first frames of a video's shots, by the sizes of packets and the pictures of keyframes: nothing else is decoded.

Where a shot begins, a frame cannot be predicted from the frame before it, and its packet is about as large as a
keyframe's:

    packets      K . . . . P . . . K . . . . . . . . K . . . .
    keyframes    A                 B                 B            neighbours are compared
    shots begin  ^         ^                                      between A and B, at the large packet

A packet that large begins a shot. A keyframe begins a shot if its picture differs from that of the keyframe before it,
unless a large packet between the two explains the difference. If the keyframe comes before the encoder's interval ends,
the packet does not explain it: encoders put a keyframe there where a shot begins. A shot lasts at least 0.6 s. A
dissolve is found at the keyframe after it.

Source: `ContentDetector` of PySceneDetect 0.6 (mean absolute difference of hue, saturation and value, at least 27) for
pictures; its `AdaptiveDetector` (3 times the mean of two neighbours on either side) for packets; its command's
--min-scene-len; `scenecut` of x264, which puts keyframes where shots begin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from gridsieve.services.preprocessing.sources.source import Source
from gridsieve.services.preprocessing.video.card import Card
from gridsieve.services.preprocessing.video.decode import DecodedFrame, decode_frames
from gridsieve.services.preprocessing.video.packets import PacketIndex

# Of more keyframes than these, evenly spread ones are compared.
MAX_COMPARED = 1024
MIN_SHOT_S = 0.6
_CONTENT_THRESHOLD = 27.0
_ADAPTIVE_RATIO, _WINDOW = 3.0, 2
# Of the smaller of the keyframes around it. P-frames of fast motion stay below.
_OF_A_KEY_FRAME = 0.5
# An interval below this share of the longest one was ended by the encoder.
_SOONER = 0.9
# Pictures are reduced to about this width. Hue counts 180 steps, as in OpenCV.
_COMPARED_PX = 128
_CHANNELS = np.array([180 / 256, 1, 1], np.float32)


def compared_keyframes(index: PacketIndex, begin: int, end: int) -> list[int]:
    """The places of the keyframes that are compared to find the shots of the frames [begin, end)."""
    places = index.keyframe_places(0, end)
    first = max((number for number, place in enumerate(places) if place <= begin), default=0)
    places = places[first:]
    if len(places) <= MAX_COMPARED:
        return places
    return [places[number * len(places) // MAX_COMPARED] for number in range(MAX_COMPARED)]


def find_shots(
    source: Source,
    index: PacketIndex,
    begin: int,
    end: int,
    progress: Callable[[], None] = lambda: None,
    card: Card | None = None,
) -> tuple[int, ...]:
    """The places in [begin, end) of the first frames of shots, increasing; the first is `begin`.

    progress: called for each packet that is read. card: which decodes. Raises as `decode_frames`.
    """
    keys = compared_keyframes(index, begin, end)
    if not keys:
        return (begin,)
    differs = _differences(decode_frames(source, index, keys, progress, len(index.times.ticks), card=card))
    longest = max((after - before for before, after in pairwise(keys)), default=0)
    sizes, stands_out = _sizes(index)
    found = [begin]
    for before, after, different in zip(keys, [*keys[1:], end], [*differs, False], strict=True):
        least = _OF_A_KEY_FRAME * (min(sizes[before], sizes[after]) if after < end else sizes[before])
        large = np.flatnonzero(stands_out[before:after] & (sizes[before:after] >= least)) + before
        found += large.tolist()
        if different and (not large.size or after - before < _SOONER * longest):
            found.append(after)
    return _apart(index, [place for place in found if begin <= place < end])


def _differences(frames: Iterable[DecodedFrame]) -> list[bool]:
    """Whether each keyframe after the first is another picture than the one before it."""
    found: list[bool] = []
    last: NDArray[np.float32] | None = None
    for frame in frames:
        picture = Image.fromarray(frame.pixels)
        small = picture.reduce(max(1, picture.width // _COMPARED_PX)).convert("HSV")
        made = np.asarray(small, np.float32) * _CHANNELS
        if last is not None:
            found.append(float(np.abs(made - last).mean()) >= _CONTENT_THRESHOLD)
        last = made
    return found


def _sizes(index: PacketIndex) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """The bytes of each frame's packet, and whether they stand out from those around them; a keyframe's do not."""
    assert index.sizes is not None
    sizes = np.asarray(index.sizes, np.float64)
    width = 2 * _WINDOW + 1
    around = np.convolve(np.pad(sizes, _WINDOW, "edge"), np.ones(width), "valid") - sizes
    stands_out = sizes >= _ADAPTIVE_RATIO * around / (width - 1)
    stands_out[index.keyframe_places(0, len(sizes))] = False
    return sizes, stands_out


def _apart(index: PacketIndex, places: Sequence[int]) -> tuple[int, ...]:
    """Drops each place that is less than MIN_SHOT_S after the last one kept. places: increasing; one may repeat."""
    ticks, apart = index.times.ticks, MIN_SHOT_S / index.times.time_base
    kept = list(places[:1])
    for place in places[1:]:
        if ticks[place] - ticks[kept[-1]] >= apart:
            kept.append(place)
    return tuple(kept)
