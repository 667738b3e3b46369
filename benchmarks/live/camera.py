"""Pictures of cameras that stand still: a textured room, things that move in it, and the sensor's noise."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

FPS = 2
_THINGS = 3
_STEP_PX = 5


def pictures(camera: int, first: int, count: int, height_px: int, width_px: int) -> list[bytes]:
    """`count` frames from number `first` on, as JPEG files. Any two frames of any cameras differ."""
    room = np.random.default_rng(camera).integers(40, 200, (height_px // 16 + 1, width_px // 16 + 1, 3), np.int16)
    room = room.repeat(16, 0).repeat(16, 1)[:height_px, :width_px]
    side = height_px // 6
    made = []
    for number in range(first, first + count):
        picture = room + np.random.default_rng((camera, number)).integers(-2, 3, (height_px, width_px, 1), np.int16)
        for thing in range(_THINGS):
            left = (thing * 97 + (1 + thing) * _STEP_PX * number) % (width_px - side)
            top = (2 * thing) * side
            picture[top : top + side, left : left + side] = (250, 60 * thing, 30)
        file = io.BytesIO()
        Image.fromarray(picture.astype(np.uint8)).save(file, "JPEG", quality=90)
        made.append(file.getvalue())
    return made
