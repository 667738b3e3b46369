"""How long it takes to make the slices of a video, from what its index says about them, before anything is decoded.

    packets     K . . . . . . . . K . . . . .         a decoder begins at a keyframe, and skips to a later one
    selected        ^     ^         ^     ^
    slice       ────0──────       ──1──────           decoded for it, after the slice before it
                                                      `begun`: as the first one, from the keyframe before it

Constants are processor time of FFmpeg's H.264 decoder on one core of x86-64, over six clips of 360p to 1080p: within
18 %. Other codecs and machines differ by a factor that is the same for all slices of a video.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gridsieve.services.preprocessing.video.packets import PacketIndex
from gridsieve.services.preprocessing.video.slices import PlannedVideo

# Decoding follows bytes more than pixels; each selected frame is converted to RGB and resized.
_S_PER_BYTE, _S_PER_PX, _S_PER_SELECTED_PX = 88e-9, 0.44e-9, 9.4e-9


@dataclass(frozen=True, slots=True)
class SliceCosts:
    """continued, begun: seconds on one core, float64 [slices]: of a slice after the one before it, and as the first
    one. begun is at least continued."""

    continued: NDArray[np.float64]
    begun: NDArray[np.float64]


def slice_costs(video: PlannedVideo) -> SliceCosts:
    """What each temporal slice of a video costs."""
    index, places = video.index, np.asarray(video.places)
    frame_px = index.height_px * index.width_px
    if isinstance(index, PacketIndex):
        continued, begun = _decoding(index, places, frame_px)
    else:
        sizes = np.diff(np.asarray(index.ends), prepend=0)[places]
        continued = begun = sizes * _S_PER_BYTE + frame_px * _S_PER_PX
    firsts = np.arange(0, places.size, video.slice_frames)
    selected = np.full(places.size, frame_px * _S_PER_SELECTED_PX)
    whole = np.add.reduceat(continued + selected, firsts)
    return SliceCosts(whole, whole + (begun - continued)[firsts])


def _decoding(
    index: PacketIndex, places: NDArray[np.int64], frame_px: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Seconds to decode up to each place, after the place before it, and from the keyframe before it."""
    shown = np.arange(len(index.times.ticks)) if index.pts is None else np.asarray(index.pts)
    packets = np.full(shown.size, frame_px * _S_PER_PX)
    if index.sizes:
        packets += np.asarray(index.sizes) * _S_PER_BYTE
    before = np.concatenate([[0.0], np.cumsum(packets)])
    keyframes = np.searchsorted(shown, np.concatenate([shown[:1], np.asarray(index.keyframes)]))
    key = keyframes[np.searchsorted(keyframes, places, side="right") - 1]
    after_last = np.concatenate([[0], places[:-1] + 1])
    return before[places + 1] - before[np.maximum(key, after_last)], before[places + 1] - before[key]
