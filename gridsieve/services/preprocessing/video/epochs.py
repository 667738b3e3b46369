"""Parts of a video whose clock starts again: joined or cut recordings, captures across a break, wrong time stamps.

    stored    0  40  80 |  0  40  80        each part as its recorder timed it
    shown     0  40  80  120 160 200        the parts follow one another

A part, called an epoch, ends where decoding times go back, or leap ahead in a format whose clock may. Reading twice
finds the same epochs, so packets are counted instead of timed.

    a part begins                                                   it is
    when the part before the last one was due to go on              the same recording; the last part had wrong stamps
    with a frame that is no keyframe, and no packet is missing      the same recording, whose clock leapt
    otherwise                                                       another recording: the decoder begins anew

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
LEAP_S = 10
MAX_EPOCHS = 1000
# Decoding times of some muxers go back by less.
JITTER_S = Fraction(1, 10)
# The format whose packets are counted: missing ones show where recordings were joined. FFmpeg marks the frame before
# the join, or the one before that.
_COUNTING_FORMAT = "mpegts"
_NEAR = 2


@dataclass(frozen=True, slots=True)
class Epoch:
    """first_packet: its ordinal among the stream's packets. shift: ticks from stored to shown times. joined: whether
    another recording begins."""

    first_packet: int
    shift: int
    joined: bool = True


@dataclass(slots=True)
class _Part:
    """What an epoch stores. begun: what follows can be decoded. returns: its clock is that of the part before the part
    before it. first_dts, last_dts: its first and last decoding time. sizes: bytes of each frame in `pts`. tail:
    duration of its last packet in ticks, 0 if unknown."""

    first_packet: int
    joined: bool = True
    begun: bool = False
    returns: bool = False
    first_dts: int = 0
    last_dts: int | None = None
    pts: array[int] = field(default_factory=lambda: array("q"))
    sizes: array[int] = field(default_factory=lambda: array("I"))
    keyframes: array[int] = field(default_factory=lambda: array("q"))
    tail: int = 0

    def tail_ticks(self, otherwise: int = 1) -> int:
        """The duration of its last frame: as stored, else the mean one, else the given one. At least 1."""
        if self.tail > 0:
            return self.tail
        if len(self.pts) < 2:
            return max(1, otherwise)
        return max(1, round(Fraction(max(self.pts) - min(self.pts), len(self.pts) - 1)))

    def lasts(self, otherwise: int = 1) -> int:
        """Ticks from its first decoding time to that which is due after it."""
        return (self.last_dts or 0) - self.first_dts + self.tail_ticks(otherwise)


class EpochReader:
    """Collects the presentation times of packets in the order of the file, by epoch."""

    def __init__(self, time_base: Fraction, format_name: str) -> None:
        self.packets = 0  # that begin a frame
        self.dts = array("q")  # of those that have a decoding time
        self._untimed = 0
        self._read = 0
        self._parts = [_Part(0)]
        self._damaged = -_NEAR  # the last packet that the container calls damaged
        self._back = round(JITTER_S / time_base)
        self._ahead = round(LEAP_S / time_base) if format_name in LEAPING_FORMATS else None
        self._counts = format_name == _COUNTING_FORMAT

    def __len__(self) -> int:
        return len(self._parts)

    def second_field(self, packet: Packet[VideoStream]) -> None:
        """A packet that holds the second field of a frame. What durations mean differs from container to container."""
        self._read += 1
        part = self._parts[-1]
        part.tail = 0
        if part.sizes:
            part.sizes[-1] += packet.size

    def hide(self, packet: Packet[VideoStream]) -> None:
        """A packet that is decoded and not shown: the container's edit list hides it."""
        self._parts[-1].begun |= packet.is_keyframe

    def show(self, packet: Packet[VideoStream]) -> None:
        """A packet whose frame is shown."""
        pts = self._follow(packet)
        self._read += 1
        self.packets += 1
        if packet.is_corrupt:
            self._damaged = self._read
        self._untimed += packet.pts is None
        part = self._parts[-1]
        part.tail = packet.duration or part.tail
        if packet.is_keyframe and not part.begun:  # what comes before the first one refers to frames that were cut off
            part.pts, part.sizes = array("q"), array("I")
            part.begun = True
        if pts is not None:
            part.pts.append(pts)
            part.sizes.append(packet.size)
            if packet.is_keyframe:
                part.keyframes.append(pts)

    def _follow(self, packet: Packet[VideoStream]) -> int | None:
        """Begins a part where decoding times break. Returns the presentation time, None if it is wrong or missing."""
        part, pts, dts = self._parts[-1], packet.pts, packet.dts
        if dts is None:
            return pts
        self.dts.append(dts)
        step = 0 if part.last_dts is None else dts - part.last_dts
        breaks = step < -self._back or (self._ahead is not None and step > self._ahead)
        if self._ahead is not None and pts is not None and abs(pts - dts) > self._ahead:
            return pts if breaks else None  # one of the two is wrong
        if breaks:
            part = self._next_part(packet.is_keyframe, dts)
        part.first_dts = dts if part.last_dts is None else part.first_dts
        part.last_dts = dts
        return pts

    def _next_part(self, is_keyframe: bool, dts: int) -> _Part:
        before = self._parts[-1]
        goes_on = self._counts and not is_keyframe and self._read - self._damaged >= _NEAR
        made = _Part(self._read, joined=not goes_on)
        if len(self._parts) > 1:
            earlier = self._parts[-2]
            made.returns = abs(dts - earlier.first_dts - earlier.lasts() - before.lasts()) <= self._back
            if made.returns:
                made.joined = before.joined = False
                before.begun |= earlier.begun
        made.begun = before.begun and not made.joined
        self._parts.append(made)
        return made

    def finish(self) -> None:
        """All packets were read. Leaves out parts without a keyframe, unless the whole file has none."""
        if any(part.begun for part in self._parts):
            for part in self._parts:
                part.pts = part.pts if part.begun else array("q")

    @property
    def is_timed(self) -> bool:
        """Whether the container stores presentation times of all frames."""
        return not self._untimed and any(part.pts for part in self._parts)

    def epochs(self, tail_ticks: int) -> tuple[Epoch, ...]:
        """All epochs, of packets that all have a time. tail_ticks: duration of a frame, where none is stored."""
        found: list[Epoch] = []
        ends: list[int] = []
        for number, part in enumerate(self._parts):
            if part.returns:
                shift = found[-2].shift
            elif not part.joined:
                before = self._parts[number - 1]
                shift = found[-1].shift + before.first_dts + before.lasts(tail_ticks) - part.first_dts
            else:
                shift = max(ends) - min(part.pts) if ends and part.pts else 0
            if part.pts:
                ends.append(max(part.pts) + shift + part.tail_ticks(tail_ticks))
            found.append(Epoch(part.first_packet, shift, part.joined))
        return tuple(found)

    def tail(self, otherwise: int) -> int:
        """The duration of the last frame in ticks."""
        return self._parts[-1].tail_ticks(otherwise)

    def shown(self, epochs: tuple[Epoch, ...]) -> tuple[array[int], array[int], array[int]]:
        """Shown times of frames, increasing, the bytes of each, and shown times of keyframes, increasing.

        Packets before the first keyframe of their recording, or with the time of another packet, are left out.
        """
        parts = tuple(zip(self._parts, epochs, strict=True))
        bytes_at = {
            pts + epoch.shift: size for part, epoch in parts for pts, size in zip(part.pts, part.sizes, strict=False)
        }
        frames = array("q", sorted(bytes_at))
        sizes = array("I", map(bytes_at.__getitem__, frames))
        keyframes = array("q", sorted(pts + epoch.shift for part, epoch in parts for pts in part.keyframes))
        return frames, sizes, keyframes


class EpochShifts:
    """Follows the epochs of packets that are read again from the first one on."""

    def __init__(self, epochs: tuple[Epoch, ...]) -> None:
        self.shift = 0
        self._packets = 0
        self._rest = list(reversed(epochs))

    def count_packet(self) -> bool:
        """Counts the next packet, to which `shift` then applies. Returns whether another recording begins with it."""
        joined = False
        while self._rest and self._rest[-1].first_packet <= self._packets:
            epoch = self._rest.pop()
            self.shift, joined = epoch.shift, epoch.joined and self._packets > 0
        self._packets += 1
        return joined
