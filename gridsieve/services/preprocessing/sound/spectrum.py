"""Power spectra of a sound, weighted by triangular filters on the mel scale.

    samples    ├──hop──┼──hop──┼──hop──┼
    frame 0 ───┴───            │                   centred on sample 0; what is before it is for the caller to say
    frame 2             ───────┴───────            centred on sample 2 · hop

Frames are computed in blocks, in float64, so that memory does not grow with the sound.

Source: the mel scale and filters of Slaney, Auditory Toolbox, 1998; `mel_filter_bank` of transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

Float32Array: TypeAlias = NDArray[np.float32]
Float64Array: TypeAlias = NDArray[np.float64]

_BLOCK_FRAMES = 2048
# Slaney's scale: linear to 1000 Hz, which is 15 mels, then 27 mels for each factor of 6.4.
_LINEAR_HZ, _LINEAR_MELS = 1000.0, 15.0
_MELS_OF_LOG = 27.0 / np.log(6.4)


def mel_powers(
    stretch: Callable[[int, int], Float64Array], frames: int, hop: int, window: Float64Array, filters: Float64Array
) -> Iterator[tuple[int, Float64Array]]:
    """Blocks of frames: the place of the first, and the power of each filter, float64 [frames, mels].

    stretch: samples from one place to another, float64, also before the first and after the last one. window:
    float64 [N], of each frame. filters: float64 [N // 2 + 1, mels].
    """
    for first in range(0, frames, _BLOCK_FRAMES):
        count = min(_BLOCK_FRAMES, frames - first)
        begin = first * hop - window.size // 2
        samples = stretch(begin, begin + (count - 1) * hop + window.size)
        spectrum = np.fft.rfft(sliding_window_view(samples, window.size)[::hop] * window)
        yield first, (spectrum.real**2 + spectrum.imag**2) @ filters


def stretch_of(samples: Float32Array, begin: int, end: int) -> Float64Array:
    """Samples [begin, end) of a sound with silence before and after it."""
    made = np.zeros(end - begin)
    first, last = max(begin, 0), min(end, samples.size)
    if first < last:
        made[first - begin : last - begin] = samples[first:last]
    return made


@lru_cache(maxsize=8)
def mel_filters(rate: int, window: int, mels: int, max_hz: float) -> Float64Array:
    """Triangles of equal area from 0 to max_hz, their centres evenly spaced; float64 [window // 2 + 1, mels]."""
    edges = _hz_of(np.linspace(0.0, _mels_of(max_hz), mels + 2))
    hz = np.linspace(0.0, rate // 2, window // 2 + 1)[:, None]
    rising = (hz - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - hz) / (edges[2:] - edges[1:-1])
    filters = np.maximum(0.0, np.minimum(rising, falling)) * (2.0 / (edges[2:] - edges[:-2]))
    filters.flags.writeable = False
    return filters


def _mels_of(hz: float) -> float:
    if hz < _LINEAR_HZ:
        return hz * _LINEAR_MELS / _LINEAR_HZ
    return float(_LINEAR_MELS + _MELS_OF_LOG * np.log(hz / _LINEAR_HZ))


def _hz_of(mels: Float64Array) -> Float64Array:
    linear = mels * _LINEAR_HZ / _LINEAR_MELS
    return np.where(mels < _LINEAR_MELS, linear, _LINEAR_HZ * np.exp((mels - _LINEAR_MELS) / _MELS_OF_LOG))
