"""The clock of a sound track, which may start again where recordings were joined, as that of the video (`epochs`).

    stored    0  40  80 |  0  40  80
    shown     0  40  80  120 160 200

The sound moves by as much as the picture, so that both stay together; where no part of the picture has such a move, it
goes on where it stopped.
"""

from __future__ import annotations

from fractions import Fraction

from gridsieve.common.contract.errors import MediaRejected
from gridsieve.services.preprocessing.sources.source import Source
from gridsieve.services.preprocessing.video.epochs import JITTER_S, LEAP_S, LEAPING_FORMATS, MAX_EPOCHS
from gridsieve.services.preprocessing.video.packets import read_packets


class Clock:
    """Follows the times of packets or frames in the order of the file.

    shift_s: from stored times to those on the clock of the first recording.
    """

    def __init__(self, source: Source, format_name: str) -> None:
        self.shift_s = Fraction(0)
        self._source = source
        self._leaps = format_name in LEAPING_FORMATS
        self._restarts = 0
        self._last_s: Fraction | None = None
        self._next_s = Fraction(0)
        self._used_s = {self.shift_s}
        self._pictures_s: frozenset[Fraction] | None = None

    def shown_s(self, time_s: Fraction | None, lasts_s: Fraction) -> Fraction:
        """When a packet or frame is heard. time_s: as stored; without a time, it follows the last one.

        Raises MediaRejected for a clock that starts again too often.
        """
        shown_s = self._next_s if time_s is None else time_s + self.shift_s
        if time_s is not None and self._last_s is not None:
            step_s = shown_s - self._last_s
            if step_s < -JITTER_S or (self._leaps and step_s > LEAP_S):
                self.shift_s = self._shift_of(time_s)
                self._used_s.add(self.shift_s)
                shown_s = time_s + self.shift_s
        self._last_s, self._next_s = shown_s, shown_s + lasts_s
        return shown_s

    def _shift_of(self, time_s: Fraction) -> Fraction:
        """Of those that the picture has or the sound had, the one with which it goes on best; else its own."""
        self._restarts += 1
        if self._restarts > MAX_EPOCHS:
            text = f"has a clock of sound that starts again more than {MAX_EPOCHS} times"
            raise MediaRejected(text, field=self._source.name, limit=MAX_EPOCHS)
        own_s = self._next_s - time_s
        if self._pictures_s is None:
            self._pictures_s = _shifts_s(self._source)
        near_s = {each for each in self._pictures_s if abs(each - own_s) <= LEAP_S}
        near_s |= {each for each in self._used_s if abs(each - own_s) <= JITTER_S}
        return min(near_s - {self.shift_s}, key=lambda each: abs(each - own_s), default=own_s)


def _shifts_s(source: Source) -> frozenset[Fraction]:
    """Those of the parts of the video; none without a video that is read."""
    try:
        index = read_packets(source)
    except MediaRejected:
        return frozenset()
    return frozenset(each.shift * index.times.time_base for each in index.epochs)
