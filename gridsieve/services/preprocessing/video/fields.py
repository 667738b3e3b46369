"""Finds packets that hold the second field of a frame, in H.264 whose frames are coded as two fields (PAFF).

    packets    top 0  bottom 0  top 1  bottom 1  frame 2      a transport stream has a packet for each field
    frames     ───────────────  ───────────────  ───────

A stream may do so only if a sequence parameter set says that not all of its pictures are frames.
Source: ITU-T H.264, 7.3.2.1.1 (sequence parameter set) and 7.3.3 (slice header).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from av.packet import Packet
from av.video.codeccontext import VideoCodecContext
from av.video.stream import VideoStream

_SLICE, _IDR_SLICE, _SEQUENCE = 1, 5, 7
_START_CODE = re.compile(b"\0\0\1")
_ESCAPE = re.compile(b"\0\0\3(?=[\0-\3])")
# More than enough for a slice header up to its field flags, and for a parameter set up to the flag of frames.
_HEADER_BYTES, _SEQUENCE_BYTES = 48, 1024
# Profiles whose parameter sets begin with a chroma format.
_HIGH_PROFILES = (44, 83, 86, 100, 110, 118, 122, 128, 134, 135, 138, 139, 244)


@dataclass(frozen=True, slots=True)
class _Sequence:
    """What a sequence parameter set says of slice headers."""

    has_colour_planes: bool
    frame_num_bits: int
    frames_only: bool


@dataclass(frozen=True, slots=True)
class _Picture:
    frame_num: int
    is_bottom: bool


class SecondFields:
    """Follows the packets of one stream, in order, from any packet on."""

    def __init__(self, codec: VideoCodecContext) -> None:
        extradata = codec.extradata or b""
        # avcC holds its sets after lengths of 16 bits, and its slices after lengths as it says.
        self._length_bytes = (extradata[4] & 3) + 1 if extradata[:1] == b"\1" and len(extradata) > 6 else 0
        self._sequence = self._declared(codec, extradata)
        self._first: _Picture | None = None  # a first field whose second one may follow
        self._may_have_fields = self._sequence is not None and not self._sequence.frames_only

    def holds(self, packet: Packet[VideoStream]) -> bool:
        """Whether the packet holds the second field of the frame that the packet before it began, and nothing else."""
        if not self._may_have_fields:
            return False
        pictures = self._fields(bytes(packet))
        first, self._first = self._first, pictures[0] if len(pictures) == 1 else None
        if first is None or self._first is None:
            return False
        if first.frame_num != self._first.frame_num or first.is_bottom == self._first.is_bottom:
            return False
        self._first = None
        return True

    def _fields(self, data: bytes) -> list[_Picture]:
        """The fields that a packet begins; empty for a frame."""
        units = _behind_lengths(data, self._length_bytes) if self._length_bytes else _behind_start_codes(data)
        found: list[_Picture] = []
        try:
            for unit in units:
                if unit and unit[0] & 31 in (_SLICE, _IDR_SLICE) and (field := self._field(unit)) is not None:
                    found += [field] if field not in found else []
        except IndexError:  # a damaged header
            return []
        return found

    def _field(self, unit: bytes) -> _Picture | None:
        assert self._sequence is not None
        bits = _Bits(unit[1:_HEADER_BYTES])
        for _ in range(3):  # first macroblock, type, picture parameter set
            bits.golomb()
        if self._sequence.has_colour_planes:
            bits.read(2)
        frame_num = bits.read(self._sequence.frame_num_bits)
        return _Picture(frame_num, bool(bits.read(1))) if bits.read(1) else None

    def _declared(self, codec: VideoCodecContext, extradata: bytes) -> _Sequence | None:
        """What the last readable parameter set of the header says."""
        found = None
        if codec.name == "h264":
            units = _behind_lengths(extradata[6:], 2) if self._length_bytes else _behind_start_codes(extradata)
            for unit in units:
                if unit and unit[0] & 31 == _SEQUENCE:
                    with suppress(IndexError):
                        found = _sequence(_Bits(unit[1:_SEQUENCE_BYTES]))
        return found


def _sequence(bits: _Bits) -> _Sequence:
    profile = bits.read(8)
    bits.read(16)  # constraints, level
    bits.golomb()
    has_colour_planes = False
    if profile in _HIGH_PROFILES:
        chroma_format = bits.golomb()
        has_colour_planes = chroma_format == 3 and bits.read(1) == 1
        bits.golomb(), bits.golomb(), bits.read(1)
        if bits.read(1):
            for number in range(12 if chroma_format == 3 else 8):
                if bits.read(1):
                    _skip_scaling_list(bits, 16 if number < 6 else 64)
    frame_num_bits = bits.golomb() + 4
    order_type = bits.golomb()
    if order_type == 0:
        bits.golomb()
    elif order_type == 1:
        bits.read(1), bits.golomb(), bits.golomb()
        for _ in range(bits.golomb()):
            bits.golomb()
    bits.golomb(), bits.read(1), bits.golomb(), bits.golomb()  # references, gaps, width, height
    return _Sequence(has_colour_planes, frame_num_bits, frames_only=bits.read(1) == 1)


def _skip_scaling_list(bits: _Bits, size: int) -> None:
    last = following = 8
    for _ in range(size):
        if following:
            code = bits.golomb()
            following = (last + ((code + 1) // 2 if code % 2 else -(code // 2))) % 256
        last = following or last


class _Bits:
    """Reads the bits of a NAL unit's payload. Raises IndexError at its end."""

    def __init__(self, escaped: bytes) -> None:
        data = _ESCAPE.sub(b"\0\0", escaped)
        self._value = int.from_bytes(data)
        self._left = 8 * len(data)

    def read(self, bits: int) -> int:
        self._left -= bits
        if self._left < 0:
            raise IndexError
        return self._value >> self._left & (1 << bits) - 1

    def golomb(self) -> int:
        """An Exp-Golomb code."""
        zeros = 0
        while self.read(1) == 0:
            zeros += 1
        return (1 << zeros) - 1 + self.read(zeros)


def _behind_start_codes(data: bytes) -> Iterator[bytes]:
    """The beginnings of NAL units."""
    for match in _START_CODE.finditer(data):
        yield data[match.end() : match.end() + _SEQUENCE_BYTES]


def _behind_lengths(data: bytes, length_bytes: int) -> Iterator[bytes]:
    """The beginnings of NAL units."""
    at = 0
    while at + length_bytes < len(data):
        start = at + length_bytes
        yield data[start : start + _SEQUENCE_BYTES]
        at = start + int.from_bytes(data[at:start])
