"""Clips for the media benchmarks: textured, moving, with keyframes at given distances."""

from __future__ import annotations

import itertools
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import av
import numpy as np
from numpy.typing import NDArray

RATE = 30
_FILES = itertools.count()


def clip(frames: int, height_px: int, width_px: int, keyframe_every: int, fps: int = RATE) -> bytes:
    """An H.264 mp4 with B-frames and a keyframe at every `keyframe_every` frames only."""
    options: dict[str, object] = {
        "preset": "veryfast",
        "g": str(keyframe_every),
        "keyint_min": str(keyframe_every),
        "sc_threshold": "0",
        "bf": "2",
    }
    with tempfile.NamedTemporaryFile(suffix=".mp4") as file:
        with av.open(file.name, "w", options={"movflags": "faststart"}) as container:
            stream = container.add_stream("libx264", rate=fps)
            stream.height, stream.width, stream.pix_fmt, stream.options = height_px, width_px, "yuv420p", options
            for picture in pictures(frames, height_px, width_px):
                container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
            container.mux(stream.encode())
        return Path(file.name).read_bytes()


def another_file(data: bytes) -> bytes:
    """The same clip with different bytes, unknown to every cache: a box that readers skip is appended."""
    return data + struct.pack(">I4sQ", 16, b"free", next(_FILES))


def another_path(folder: Path, data: bytes) -> str:
    """Writes the same clip with different bytes to a new file in `folder`; returns its name."""
    name = f"{next(_FILES)}.mp4"
    (folder / name).write_bytes(another_file(data))
    return name


def pictures(frames: int, height_px: int, width_px: int) -> Iterator[NDArray[np.uint8]]:
    """Frames, uint8 [height_px, width_px, 3]: a panning background, moving squares, a little noise."""
    random = np.random.default_rng(0)
    ground = random.integers(30, 200, (height_px // 16 + 1, width_px // 16 + 1, 3), np.uint8)
    ground = ground.repeat(16, 0).repeat(16, 1)[:height_px, :width_px]
    noise = random.integers(0, 24, (4, height_px, width_px, 1), np.uint8)
    side = height_px // 6
    for index in range(frames):
        picture = np.roll(ground, 2 * index, 1) + noise[index % 4]
        for square in range(4):
            left = (square * 97 + (3 + square) * index) % (width_px - side)
            picture[square * side : (square + 1) * side, left : left + side] = (250, 60 * square, 30)
        yield picture
