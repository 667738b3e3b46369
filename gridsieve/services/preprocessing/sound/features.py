"""Log-mel features of a sound, as Whisper's extractor of transformers makes them.

    samples    ├──hop──┼──hop──┼──hop──┼           16 kHz, mono
    frame 0 ───┴───            │                   centred on sample 0; the samples are mirrored before it
    frame 2             ───────┴───────            centred on sample 2 · hop, `window` samples long

A frame's power spectrum is weighted by triangular filters, whose centres are spaced evenly on the mel scale. Values
below the loudest one by more than 80 dB are raised to that. Frames are computed in blocks, so that beside the result
memory does not grow with the sound. It knows no torch.

Source: Radford et al., arXiv 2212.04356, 2.2; `WhisperFeatureExtractor` of transformers 5.24; the mel scale of Slaney,
Auditory Toolbox, 1998.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Self, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from gridsieve.common.checkpoint import Checkpoint

Float32Array: TypeAlias = NDArray[np.float32]
Float64Array: TypeAlias = NDArray[np.float64]

# The upper end of the filters, whatever the rate.
_MAX_HZ = 8000.0
_BLOCK_FRAMES = 2048
_LEAST_POWER = 1e-10
# Decades of power below the loudest value: 80 dB.
_DECADES = 8.0


@dataclass(frozen=True, slots=True)
class LogMel:
    """The features of a model.

    rate: samples a second. mels: filters. window: samples of a frame. hop: samples from one frame to the next.
    max_samples: the longest sound that the model takes; None: any. padded: silence follows the sound up to
    `max_samples`, so its last frame is whole; otherwise the sound is mirrored at its end, and only whole hops count.
    """

    rate: int
    mels: int
    window: int
    hop: int
    max_samples: int | None
    padded: bool

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, padded: bool = True) -> Self:
        """Of preprocessor_config.json, or of processor_config.json's feature_extractor.

        padded: as the family's processor of transformers calls the extractor: Qwen2.5-Omni's with padding
        "max_length", Qwen3-Omni's (False) with padding to the longest, which is the sound itself, and any length.
        Raises StartupError for a value that is wrong or not supported.
        """
        settings = checkpoint.read_json("processor_config.json").part("feature_extractor")
        settings = settings or checkpoint.read_json("preprocessor_config.json")
        if settings.get("dither", 0.0) != 0.0:  # random noise: equal sounds would have other features
            raise settings.refusal("dither", "0")
        rate, hop = settings.whole("sampling_rate", 16_000), settings.whole("hop_length", 160)
        longest = settings.whole("chunk_length", 30) * rate if padded else None
        mels, window = settings.whole("feature_size", 80), settings.whole("n_fft", 400, least=2)
        return cls(rate, mels, window, hop, longest, padded)

    def frames_of(self, samples: int) -> int:
        """How many frames a sound of so many samples has; at least one, unless it is empty."""
        if self.padded:
            return -(-samples // self.hop)
        return max(samples // self.hop, min(samples, 1))

    def of(self, samples: Float32Array) -> Float32Array:
        """samples: float32 [N] within ±1, at most `max_samples`. Returns float32 [mels, frames_of(N)].

        Not padded, a sound that is too short to be mirrored, of at most window / 2 samples, is followed by silence.
        """
        assert samples.ndim == 1
        assert self.max_samples is None or samples.size <= self.max_samples
        frames = self.frames_of(samples.size)
        made = np.empty((self.mels, frames), np.float32)
        loudest = np.log10(_LEAST_POWER)
        for first, powers in self._powers(samples, frames):
            logs = np.log10(np.maximum(powers, _LEAST_POWER))
            loudest = max(loudest, logs.max())
            block = made[:, first : first + len(logs)]
            block[:] = logs[: block.shape[1]].T
        np.maximum(made, np.float32(loudest - _DECADES), out=made)
        made += 4
        made /= 4
        return made

    def _powers(self, samples: Float32Array, frames: int) -> Iterator[tuple[int, Float64Array]]:
        """Blocks of frames: the place of the first, and the power of each filter, float64 [frames, mels].

        Padded, frames of the silence follow that still have samples of the sound: they may hold the loudest value.
        """
        half = self.window // 2
        length = samples.size  # after which the sound is mirrored
        if self.max_samples is not None and self.padded:
            length = self.max_samples
            frames = min(length // self.hop, -(-(samples.size + half) // self.hop)) if frames else 0
        elif samples.size <= half:
            length = half + 1
        shape = _hann(self.window)
        filters = mel_filters(self.rate, self.window, self.mels, _MAX_HZ)
        for first in range(0, frames, _BLOCK_FRAMES):
            count = min(_BLOCK_FRAMES, frames - first)
            begin = first * self.hop - half
            heard = _mirrored(samples, length, begin, begin + (count - 1) * self.hop + self.window)
            windows = sliding_window_view(heard, self.window)[:: self.hop]
            spectrum = np.fft.rfft(windows * shape)
            yield first, (spectrum.real**2 + spectrum.imag**2) @ filters


def _mirrored(samples: Float32Array, length: int, begin: int, end: int) -> Float64Array:
    """Samples [begin, end) of a sound that silence follows up to `length`, and that is mirrored at both ends."""
    places = np.abs(np.arange(begin, end))
    places = np.where(places >= length, 2 * (length - 1) - places, places)
    heard = np.zeros(end - begin)
    is_sound = (places >= 0) & (places < samples.size)
    heard[is_sound] = samples[places[is_sound]]
    return heard


def _hann(size: int) -> Float64Array:
    """The periodic Hann window."""
    return 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(size) / size)


@lru_cache(maxsize=8)
def mel_filters(rate: int, window: int, mels: int, max_hz: float) -> Float64Array:
    """Triangular filters of equal area on Slaney's mel scale, float64 [window // 2 + 1, mels], read-only."""
    edges = _hz_of(np.linspace(0.0, _mel_of(max_hz), mels + 2))
    hz = np.linspace(0.0, rate // 2, window // 2 + 1)[:, None]
    rising = (hz - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - hz) / (edges[2:] - edges[1:-1])
    filters = np.maximum(0.0, np.minimum(rising, falling)) * (2.0 / (edges[2:] - edges[:-2]))
    filters.flags.writeable = False
    return filters


# Slaney's scale: linear to 1000 Hz, which is 15 mels, then 27 mels for each factor of 6.4.
_LINEAR_HZ, _LINEAR_MELS = 1000.0, 15.0
_MELS_OF_LOG = 27.0 / np.log(6.4)


def _mel_of(hz: float) -> float:
    if hz < _LINEAR_HZ:
        return hz * _LINEAR_MELS / _LINEAR_HZ
    return float(_LINEAR_MELS + _MELS_OF_LOG * np.log(hz / _LINEAR_HZ))


def _hz_of(mels: Float64Array) -> Float64Array:
    linear = mels * _LINEAR_HZ / _LINEAR_MELS
    return np.where(mels < _LINEAR_MELS, linear, _LINEAR_HZ * np.exp((mels - _LINEAR_MELS) / _MELS_OF_LOG))
