"""Whether one more stream may be watched: there must be memory for it, and cores that the others leave.

    cores    [camera 1  0.17][camera 2  0.17][camera 3  0.02][one that has just begun  0.12] ……… | a quarter
                    measured                                  the mean of the others               for all other work

What a camera costs depends on what it sends, which only its worker's processor time shows. A stream that a client sends
waits where cores lack, and a camera does not: the time of cameras alone is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from statistics import mean

# A stream of 1920×1080 in H.264 takes 61 MiB, one of 640×360 27 MiB. Streams may take a quarter of the memory.
_STREAM_BYTES, _MEMORY_SHARE = 64 * 2**20, Fraction(1, 4)
# The rest is for the service itself, which relays what cameras send, and for a stream that takes more than the others.
_CORES_SHARE = 0.75
# Of a stream, while none is measured: between 640×360 and 1280×720 with 25 frames a second.
_FIRST_CORES = 0.05
# How long a camera is measured. Its pauses and the time between its key frames are shorter.
_MEASURED_S = 10.0


class CoresUsed:
    """The cores that a process uses: its processor time in the time since it was last asked for."""

    def __init__(self, processor_s: Callable[[], float], clock_s: Callable[[], float]) -> None:
        self._processor_s, self._clock_s = processor_s, clock_s
        self._since = (clock_s(), processor_s())
        self._cores: float | None = None

    def now(self) -> float | None:
        """As measured over the last _MEASURED_S or more; None: it has not run for as long."""
        passed_s = self._clock_s() - self._since[0]
        if passed_s >= _MEASURED_S:
            with suppress(OSError):  # without a free descriptor it is as measured before
                used_s = self._processor_s()
                self._cores = (used_s - self._since[1]) / passed_s
                self._since = (self._since[0] + passed_s, used_s)
        return self._cores


@dataclass(frozen=True, slots=True)
class StreamRoom:
    """most: streams at a time, and why no more may be. cores: that they may use together; None: as many as they do."""

    most: int
    why: str = "--max-streams"
    cores: float | None = None

    @classmethod
    def of(cls, cores: float, memory_bytes: int, max_requests: int | None) -> StreamRoom:
        """Of a machine. Each stream is one of the requests that run, of which the others need some."""
        held = f"a quarter of {memory_bytes >> 20} MiB, {_STREAM_BYTES >> 20} for each"
        limits = [(int(memory_bytes * _MEMORY_SHARE) // _STREAM_BYTES, held)]
        if max_requests is not None:
            limits.append((max_requests // 2, f"half of --max-requests {max_requests}"))
        most, why = min(limits)
        return cls(max(1, most), f"--max-streams is unset: {why}", cores * _CORES_SHARE)

    def refusal(self, streams: int, cameras: int, measured: Sequence[float]) -> str:
        """Why no further stream may be watched; empty: it may.

        cameras: how many of the streams are cameras. measured: the cores that some of the cameras use.
        """
        if streams >= self.most:
            return f"{self.most} streams are watched, and no more may be ({self.why})"
        used = sum(measured) + (cameras - len(measured)) * (mean(measured) if measured else _FIRST_CORES)
        if self.cores is None or used < self.cores:
            return ""
        return (
            f"{cameras} cameras are watched, which use {used:.2f} cores, and no more may be while they use "
            f"{self.cores:g} or more (--max-streams is unset: three quarters of the cores)"
        )
