"""The orientation of pictures and videos as one of EXIF's eight numbers, and turning pixels upright.

    1 ⎡F  ⎤   2 ⎡  F⎤   3 rotated by 180°   4 flipped vertically   5 to 8: 1 to 4, transposed

A video has a display matrix instead of a number. PyAV exposes it only on decoded frames, so the header is searched
first: `packets` decodes a frame only if the header hints at a matrix. Orientations that a codec gives for single frames
(an SEI message of H.264 and HEVC) are ignored, as players do.

    ⎡a b u⎤    a pixel (x, y) is shown at (a·x + c·y, b·x + d·y), moved back into view. Only the signs are used, and
    ⎢c d v⎥    which pair is larger: frames are turned by quarters and mirrored, not by other angles
    ⎣x y w⎦

Source: ISO/IEC 14496-12, 8.3.2 (`tkhd`); ProjectionPose of Matroska; CIPA DC-008 (EXIF), tag 274.
"""

from __future__ import annotations

import math
import re
import struct
from typing import BinaryIO

import numpy as np
from av.sidedata.sidedata import SideData
from av.video.frame import VideoFrame

from gridsieve.services.preprocessing.video.resize import UInt8Array

UPRIGHT = 1
ON_ITS_SIDE = (5, 6, 7, 8)

# Orientation -> (transpose, reverse rows, reverse columns), applied in this order.
_TURNS = {
    1: (False, False, False),
    2: (False, False, True),
    3: (False, True, True),
    4: (False, True, False),
    5: (True, False, False),
    6: (True, False, True),
    7: (True, True, True),
    8: (True, True, False),
}
_ORIENTATIONS = {turns: orientation for orientation, turns in _TURNS.items()}

_UNITY = struct.pack(">9i", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)
# Bytes from a box's type to its matrix, in version 0 and in version 1 of the box.
_MATRIX_AT = {b"mvhd": (40, 52), b"tkhd": (44, 56)}
_MATROSKA = b"\x1a\x45\xdf\xa3"
_CLUSTER = b"\x1f\x43\xb6\x75"
_POSE = re.compile(rb"\x76[\x73-\x75][\x84\x88]")
_HEAD_BYTES = 2**16
_MAX_OFFSET = 2**62
_MAX_BOXES = 2**10
_MAX_MOVIE_BYTES = 2**26


def upright(pixels: UInt8Array, orientation: int) -> UInt8Array:
    """uint8 [H, W, 3] to uint8 [H, W, 3], or [W, H, 3] for orientations 5 to 8. Unknown ones count as upright."""
    transposed, rows_reversed, columns_reversed = _TURNS.get(orientation, _TURNS[UPRIGHT])
    if transposed:
        pixels = pixels.swapaxes(0, 1)
    return np.ascontiguousarray(pixels[:: -1 if rows_reversed else 1, :: -1 if columns_reversed else 1])


def orientation_of(frame: VideoFrame) -> int:
    """The orientation of a decoded frame by its display matrix, rounded to the nearest quarter turn."""
    a, b, c, d = _matrix(frame)
    if abs(b) + abs(c) > abs(a) + abs(d):
        return _ORIENTATIONS[True, b < 0, c < 0]
    return _ORIENTATIONS[False, d < 0, a < 0]


def may_be_turned(file: BinaryIO) -> bool:
    """Whether the header of an mp4, mov or Matroska file has a display matrix other than the identity."""
    head = file.read(_HEAD_BYTES)
    if head.startswith(_MATROSKA):
        return _POSE.search(head.split(_CLUSTER)[0]) is not None
    boxes = movie(file)
    for match in re.finditer(b"mvhd|tkhd", boxes):
        start = match.start() + _MATRIX_AT[match[0]][boxes[match.end() : match.end() + 1] == b"\1"]
        if boxes[start : start + len(_UNITY)] != _UNITY:
            return True
    return False


def movie(file: BinaryIO) -> bytes:
    """The `moov` box of an mp4 or mov file; empty if there is none."""
    offset = 0
    for _ in range(_MAX_BOXES):
        if offset >= _MAX_OFFSET:
            break
        file.seek(offset)
        header = file.read(16)
        if len(header) < 8:
            break
        size, kind = struct.unpack(">I4s", header[:8])
        if kind == b"moov":
            return header + file.read(min(size, _MAX_MOVIE_BYTES))
        size = int.from_bytes(header[8:]) if size == 1 else size
        if size < 8:
            break
        offset += size
    return b""


def _matrix(frame: VideoFrame) -> tuple[float, float, float, float]:
    """The entries a, b, c and d of a frame's display matrix."""
    try:
        data = frame.side_data.get("DISPLAYMATRIX")
    except ValueError:  # PyAV does not know some kind of side data of this frame; then mirroring is not known either
        turned = math.radians(frame.rotation)
        return math.cos(turned), -math.sin(turned), math.sin(turned), math.cos(turned)
    if not isinstance(data, SideData):
        return 1, 0, 0, 1
    a, b, _, c, d = np.frombuffer(bytes(data), np.int32, 5).tolist()
    return a, b, c, d
