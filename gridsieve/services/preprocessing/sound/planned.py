"""A planned sound: which part of a sound track is heard, and its features.

`workers` decides where and when they are made.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from fractions import Fraction
from time import monotonic_ns

from gridsieve.services.preprocessing.sound.features import MelFeatures
from gridsieve.services.preprocessing.sound.track import SoundIndex, decode_sound
from gridsieve.services.preprocessing.sources.source import Source
from gridsieve.services.preprocessing.video.slices import Slice

_NS = 1e-9


@dataclass(frozen=True, slots=True)
class PlannedSound:
    """So many samples of a sound track from start_s on, on the clock of its index, at the rate of its features."""

    source: Source
    index: SoundIndex
    start_s: Fraction
    samples: int
    log_mel: MelFeatures

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of its features: one frame, mel bands, moments, one channel."""
        return 1, self.log_mel.mels, self.log_mel.frames_of(self.samples), 1

    @property
    def length_s(self) -> Fraction:
        return Fraction(self.samples, self.log_mel.rate)

    def slices(self, progress: Callable[[], None] = lambda: None) -> Generator[Slice, None, None]:
        """Yields its features as one slice, whose frame is float32, of `shape`. progress, and exceptions: as of
        `decode_sound`."""
        start_ns = monotonic_ns()
        end_s = self.start_s + self.length_s
        samples = decode_sound(self.source, self.index, self.start_s, end_s, self.log_mel.rate, progress)
        decoded_ns = monotonic_ns()
        features = self.log_mel.of(samples).reshape(self.shape)
        made_ns = monotonic_ns()
        yield Slice(0, features, 0, (decoded_ns - start_ns) * _NS, (made_ns - decoded_ns) * _NS, decoded_ns, made_ns)
