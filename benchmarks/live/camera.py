"""What cameras that stand still see: a textured room, things that move in it, and the sensor's noise."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import av
import numpy as np
from numpy.typing import NDArray
from PIL import Image

FPS = 2
_THINGS = 3
_STEP_PX = 5


def pictures(camera: int, first: int, count: int, height_px: int, width_px: int) -> list[bytes]:
    """`count` frames from number `first` on, as JPEG files. Any two frames of any cameras differ."""
    made = []
    for frame in frames(camera, range(first, first + count), height_px, width_px):
        file = io.BytesIO()
        Image.fromarray(frame).save(file, "JPEG", quality=90)
        made.append(file.getvalue())
    return made


def write_film(path: Path, camera: int, count: int, fps: int, height_px: int, width_px: int, bit_rate: int) -> None:
    """Writes `count` frames as an MP4 file of H.264 as cameras send it: a keyframe every two seconds, and no B-frames.

    Things move in the first half, and stand still in the second. bit_rate: bits a second, on average.
    """
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=fps)
        stream.height, stream.width, stream.pix_fmt, stream.bit_rate = height_px, width_px, "yuv420p", bit_rate
        stream.options = {"preset": "superfast", "bf": "0", "g": str(2 * fps)}
        stream.codec_context.thread_count = 1
        for frame in frames(camera, range(count), height_px, width_px, lambda number: min(number, count // 2)):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())


def frames(
    camera: int,
    numbers: Iterable[int],
    height_px: int,
    width_px: int,
    moved: Callable[[int], int] = lambda number: number,
) -> Iterator[NDArray[np.uint8]]:
    """Frames, uint8 [height_px, width_px, 3]. moved: the steps that things have made before a frame, by its number."""
    room = np.random.default_rng(camera).integers(40, 200, (height_px // 16 + 1, width_px // 16 + 1, 3), np.int16)
    room = room.repeat(16, 0).repeat(16, 1)[:height_px, :width_px]
    side = height_px // 6
    for number in numbers:
        picture = room + np.random.default_rng((camera, number)).integers(-2, 3, (height_px, width_px, 1), np.int16)
        for thing in range(_THINGS):
            left = (thing * 97 + (1 + thing) * _STEP_PX * moved(number)) % (width_px - side)
            top = (2 * thing) * side
            picture[top : top + side, left : left + side] = (250, 60 * thing, 30)
        yield picture.astype(np.uint8)
