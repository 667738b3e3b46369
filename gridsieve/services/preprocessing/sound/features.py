"""Features of a sound as the extractors of transformers make them: Whisper's for Qwen, Parakeet's for Nemotron.

LogMel: logarithms of `spectrum`'s powers; values below the loudest one by more than 80 dB are raised to that. The
samples are mirrored at both ends. ParakeetMel: of a sound whose high frequencies are raised, with silence at both ends;
each filter's logarithms are moved and scaled to mean 0 and variance 1.

Source: Radford et al., arXiv 2212.04356, 2.2; `WhisperFeatureExtractor` and `ParakeetFeatureExtractor` of transformers
5.24.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Self, TypeAlias

import numpy as np

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.fields import Fields
from gridsieve.services.preprocessing.sound.spectrum import (
    Float32Array,
    Float64Array,
    mel_filters,
    mel_powers,
    stretch_of,
)

_RATE, _HOP, _MELS = 16_000, 160, 80
# The upper end of Whisper's filters, whatever the rate.
_MAX_HZ = 8000.0
_LEAST_POWER = 1e-10
# Decades of power below the loudest value: 80 dB.
_DECADES = 8.0
_PARAKEETS_LEAST_POWER, _PARAKEETS_LEAST_DEVIATION = 2.0**-24, 1e-5


@dataclass(frozen=True, slots=True)
class LogMel:
    """Whisper's features.

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
        """Of processor_config.json's feature_extractor, else of preprocessor_config.json.

        padded: as the family's processor of transformers calls the extractor: Qwen2.5-Omni's with padding
        "max_length", Qwen3-Omni's (False) with padding to the longest, which is the sound itself, and any length.
        Raises StartupError for a value that is wrong or not supported.
        """
        settings = _settings(checkpoint)
        if settings.get("dither", 0.0) != 0.0:  # random noise: equal sounds would have other features
            raise settings.refusal("dither", "0")
        rate, hop = settings.whole("sampling_rate", _RATE), settings.whole("hop_length", _HOP)
        longest = settings.whole("chunk_length", 30) * rate if padded else None
        mels, window = settings.whole("feature_size", _MELS), settings.whole("n_fft", 400, least=2)
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
        half, frames = self.window // 2, self.frames_of(samples.size)
        heard, length = frames, max(samples.size, half + 1)
        if self.padded and self.max_samples is not None:
            # Frames of the silence that still have samples of the sound may hold the loudest value.
            length = self.max_samples
            heard = min(length // self.hop, -(-(samples.size + half) // self.hop)) if frames else 0
        made, loudest = np.empty((self.mels, frames), np.float32), np.log10(_LEAST_POWER)
        window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(self.window) / self.window)  # the periodic Hann window
        filters = mel_filters(self.rate, self.window, self.mels, _MAX_HZ)
        for first, powers in mel_powers(partial(_mirrored, samples, length), heard, self.hop, window, filters):
            logs = np.log10(np.maximum(powers, _LEAST_POWER))
            loudest = max(loudest, logs.max())
            block = made[:, first : first + len(logs)]
            block[:] = logs[: block.shape[1]].T
        np.maximum(made, np.float32(loudest - _DECADES), out=made)
        made += 4
        made /= 4
        return made


@dataclass(frozen=True, slots=True)
class ParakeetMel:
    """Parakeet's features, which NVIDIA's models of sound take.

    rate, mels, hop, max_samples: as of `LogMel`. transform: samples of a Fourier transform, of which `window` are
    heard. preemphasis: how much of the sample before each one is subtracted from it.
    """

    rate: int
    mels: int
    transform: int
    window: int
    hop: int
    preemphasis: float
    max_samples: int | None = None

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, max_frames: int | None = None) -> Self:
        """As `LogMel.from_checkpoint`. The number of filters may stand in config.json alone, as that of the tower.

        max_frames: of the longest sound that the model takes; None: any.
        """
        settings, config = _settings(checkpoint), checkpoint.config
        tower = config.part("audio_config") or config.part("sound_config")
        transform = settings.whole("n_fft", 512, least=2)
        window = settings.whole("win_length", 400, least=2)
        if window > transform:
            raise settings.refusal("win_length", f"at most n_fft, {transform}")
        preemphasis = settings.number("preemphasis", 0.97, lambda value: 0 <= value <= 1, "from 0 to 1")
        mels = settings.whole("feature_size", tower.whole("num_mel_bins", _MELS))
        rate, hop = settings.whole("sampling_rate", _RATE), settings.whole("hop_length", _HOP)
        longest = None if max_frames is None else (max_frames - 1) * hop
        return cls(rate, mels, transform, window, hop, preemphasis, longest)

    def frames_of(self, samples: int) -> int:
        """How many frames a sound of so many samples has: its whole hops, and one of zeros, which the mask leaves out.

        A sound of fewer than two hops, of which transformers makes no numbers, is followed by silence up to two.
        """
        return max(samples, 2 * self.hop) // self.hop + 1 if samples else 0

    def of(self, samples: Float32Array) -> Float32Array:
        """samples: float32 [N] within ±1. Returns float32 [mels, frames_of(N)], the last frame zeros."""
        assert samples.ndim == 1
        made = np.zeros((self.mels, self.frames_of(samples.size)), np.float32)
        if samples.size < 2 * self.hop:
            samples = np.pad(samples, (0, 2 * self.hop - samples.size))
        logs = made[:, :-1]
        spare = self.transform - self.window
        window = np.pad(np.hanning(self.window), (spare // 2, spare - spare // 2))
        filters = mel_filters(self.rate, self.transform, self.mels, self.rate / 2)
        stretch = partial(_emphasised, samples, self.preemphasis)
        for first, powers in mel_powers(stretch, logs.shape[1], self.hop, window, filters):
            logs[:, first : first + len(powers)] = np.log(powers + _PARAKEETS_LEAST_POWER).T
        for row in logs if logs.size else ():
            mean, deviation = row.mean(dtype=np.float64), row.std(dtype=np.float64, ddof=1)
            row -= mean
            row /= deviation + _PARAKEETS_LEAST_DEVIATION
        return made


MelFeatures: TypeAlias = LogMel | ParakeetMel


def _settings(checkpoint: Checkpoint) -> Fields:
    whole = checkpoint.read_json("processor_config.json").part("feature_extractor")
    return whole or checkpoint.read_json("preprocessor_config.json")


def _mirrored(samples: Float32Array, length: int, begin: int, end: int) -> Float64Array:
    """Samples [begin, end) of a sound that silence follows up to `length`, and that is mirrored at both ends."""
    places = np.abs(np.arange(begin, end))
    places = np.where(places >= length, 2 * (length - 1) - places, places)
    is_sound = (places >= 0) & (places < samples.size)
    made = np.zeros(end - begin)
    made[is_sound] = samples[places[is_sound]]
    return made


def _emphasised(samples: Float32Array, share: float, begin: int, end: int) -> Float64Array:
    """Samples [begin, end) of a sound, from each of which a share of the one before was subtracted; silence around."""
    made = stretch_of(samples, begin - 1, end)
    made = made[1:] - share * made[:-1]
    made[max(0, samples.size - begin) :] = 0
    return made
