"""Parts of a video whose clock starts again: joined or cut recordings, captures across a break.

    stored    0  40  80 |  0  40  80        each part as its recorder timed it
    shown     0  40  80  120 160 200        the parts follow one another

A part, called an epoch, ends where decoding times go back, or leap ahead in a format whose clock may. Reading twice
finds the same epochs, so packets are counted instead of timed.
Source: `-dts_delta_threshold` of ffmpeg.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from fractions import Fraction

from av.packet import Packet
from av.video.stream import VideoStream

# Formats whose clock may leap at any packet (FFmpeg's AVFMT_TS_DISCONT): a leap says nothing about what was recorded.
LEAPING_FORMATS = ("mpegts", "mpeg")
_LEAP_S = 10
MAX_EPOCHS = 1000
# Decoding times of some muxers go back by less.
_JITTER_S = Fraction(1, 10)


@dataclass(frozen=True, slots=True)
class Epoch:
    """first_packet: its ordinal among the stream's packets. shift: ticks from stored to shown times."""

    first_packet: int
    shift: int


@dataclass(slots=True)
class _Part:
    """What an epoch stores. begun: it had a keyframe. tail: duration of its last packet in ticks, 0 if unknown."""

    first_packet: int
    pts: array[int] = field(default_factory=lambda: array("q"))
    keyframes: array[int] = field(default_factory=lambda: array("q"))
    begun: bool = False
    tail: int = 0

    def tail_ticks(self, otherwise: int) -> int:
        """The duration of its last frame: as stored, else the mean one, else the given one. At least 1."""
        if self.tail > 0:
            return self.tail
        if len(self.pts) < 2:
            return max(1, otherwise)
        return max(1, round(Fraction(max(self.pts) - min(self.pts), len(self.pts) - 1)))


class EpochReader:
    """Collects the presentation times of packets in the order of the file, by epoch."""

    def __init__(self, time_base: Fraction, leaps: bool) -> None:
        self.packets = 0  # that begin a frame
        self.untimed = 0
        self._read = 0
        self._parts = [_Part(0)]
        self._last_dts: int | None = None
        self._back = round(_JITTER_S / time_base)
        self._ahead = round(_LEAP_S / time_base) if leaps else None

    def __len__(self) -> int:
        return len(self._parts)

    def second_field(self) -> None:
        """A packet that holds the second field of a frame. What durations mean differs from container to container."""
        self._read += 1
        self._parts[-1].tail = 0

    def hide(self, packet: Packet[VideoStream]) -> None:
        """A packet that is decoded and not shown: the container's edit list hides it."""
        self._parts[-1].begun |= packet.is_keyframe

    def add(self, packet: Packet[VideoStream]) -> None:
        if packet.dts is not None:
            if self._last_dts is not None and self._breaks(packet.dts - self._last_dts):
                self._parts.append(_Part(self._read))
            self._last_dts = packet.dts
        self._read += 1
        self.packets += 1
        part = self._parts[-1]
        part.tail = packet.duration or part.tail
        if packet.pts is None:
            self.untimed += 1
            return
        if packet.is_keyframe:
            if not part.begun:  # what comes before the first one refers to frames that were cut off
                part.pts = array("q")
                part.begun = True
            part.keyframes.append(packet.pts)
        part.pts.append(packet.pts)

    def _breaks(self, step: int) -> bool:
        return step < -self._back or (self._ahead is not None and step > self._ahead)

    @property
    def furthest(self) -> int:
        """The stored time that is furthest from 0."""
        return max((each for part in self._parts for each in (min(part.pts), max(part.pts))), key=abs)

    def epochs(self, tail_ticks: int) -> tuple[Epoch, ...]:
        """All epochs, of packets that all have a time. tail_ticks: duration of a frame, where none is stored."""
        found: list[Epoch] = []
        end = min(self._parts[0].pts)
        for part in self._parts:
            shift = end - min(part.pts) if found else 0
            end = max(part.pts) + shift + part.tail_ticks(tail_ticks)
            found.append(Epoch(part.first_packet, shift))
        return tuple(found)

    def tail(self, otherwise: int) -> int:
        """The duration of the last frame in ticks."""
        return self._parts[-1].tail_ticks(otherwise)

    def shown(self, epochs: tuple[Epoch, ...]) -> tuple[array[int], array[int]]:
        """Shown times of frames and of keyframes, both increasing.

        Packets before the first keyframe of their epoch, or with the time of another packet, are left out.
        """
        parts = tuple(zip(self._parts, epochs, strict=True))
        frames = array("q", (pts + epoch.shift for part, epoch in parts for pts in sorted(set(part.pts))))
        keyframes = array("q", (pts + epoch.shift for part, epoch in parts for pts in sorted(part.keyframes)))
        return frames, keyframes


class EpochShifts:
    """Follows the epochs of packets that are read again from the first one on."""

    def __init__(self, epochs: tuple[Epoch, ...]) -> None:
        self.shift = 0
        self._packets = 0
        self._rest = list(reversed(epochs))

    def add(self) -> bool:
        """Counts the next packet. Returns whether an epoch begins with it: `shift` is then the new one."""
        begins = False
        while self._rest and self._rest[-1].first_packet <= self._packets:
            self.shift, begins = self._rest.pop().shift, self._packets > 0
        self._packets += 1
        return begins
