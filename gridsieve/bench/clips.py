"""Synthetic clips for a load without a workload file: moving shapes, encoded as H.264.

Each clip is a static, textured background with two squares that move for part of the time: mostly repetition, which is
what pruning finds in real video. It knows nothing of questions or servers.
"""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Iterator
from fractions import Fraction
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Pixels: TypeAlias = NDArray[np.uint8]

# Seconds, width and height in pixels.
KINDS = ((8, 448, 448), (16, 448, 336), (12, 640, 360), (16, 448, 448))
FPS = 8
_SHAPES = 2
_STAMP_BYTES = 16


def clips() -> list[bytes]:
    """One mp4 file for each of KINDS. Every run draws the same pixels; the bytes depend on the x264 build."""
    return [_encoded(*kind, np.random.default_rng((0, index))) for index, kind in enumerate(KINDS)]


def stamped(clip: bytes) -> bytes:
    """The same clip with different bytes: appends a `free` box, which players skip, with 16 random bytes.

    Caches identify media by content, so a stamped clip never hits a cache, in this run or a later one. Files other
    than mp4 and its relatives have no boxes and are returned as they are.
    """
    if clip[4:8] != b"ftyp":
        return clip
    return clip + struct.pack(">I4s", 8 + _STAMP_BYTES, b"free") + os.urandom(_STAMP_BYTES)


def draw(seconds: int, width: int, height: int, rng: np.random.Generator) -> Iterator[Pixels]:
    """The frames of a clip, in order: uint8 [height, width, 3]."""
    ground = _ground(width, height, rng)
    side = min(width, height) // 5
    colours = rng.integers(0, 256, (_SHAPES, 3), np.uint8)
    starts, ends = rng.uniform(0, 1, (2, _SHAPES, 2))
    begins_s = rng.uniform(0, 0.7 * seconds, _SHAPES)
    for index in range(seconds * FPS):
        picture = ground.copy()
        for colour, start, end, begin_s in zip(colours, starts, ends, begins_s, strict=True):
            gone = np.clip((index / FPS - begin_s) / (0.3 * seconds), 0, 1)
            left, top = ((start + gone * (end - start)) * (width - side, height - side)).astype(int)
            picture[top : top + side, left : left + side] = colour
        yield picture


def _encoded(seconds: int, width: int, height: int, rng: np.random.Generator) -> bytes:
    import av  # imported on use: slow, and other commands do not need it

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=Fraction(FPS))
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.options = {"preset": "veryfast"}
        stream.codec_context.thread_count = 1
        for picture in draw(seconds, width, height, rng):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


def _ground(width: int, height: int, rng: np.random.Generator) -> Pixels:
    """Squares of 16 × 16 pixels in muted colours: uint8 [height, width, 3]."""
    squares = rng.integers(60, 140, (-(-height // 16), -(-width // 16), 3), np.uint8)
    return squares.repeat(16, axis=0).repeat(16, axis=1)[:height, :width]
