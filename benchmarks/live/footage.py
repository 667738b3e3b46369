"""Footage of cameras in which things change slowly: made with a sensor's noise, encoded as cameras do, and decoded."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

HEIGHT_PX, WIDTH_PX = 240, 320
FPS, USED_FPS = 10, 2
_BITRATE = 400_000
_TILE_PX = 16

Levels = NDArray[np.float64]
Pixels = NDArray[Any]


def _textured(seed: int, low: int, high: int, rows: int = HEIGHT_PX) -> Levels:
    tiles = np.random.default_rng(seed).uniform(low, high, (rows // _TILE_PX, WIDTH_PX // _TILE_PX, 3))
    return tiles.repeat(_TILE_PX, 0).repeat(_TILE_PX, 1)


_ROOM, _LEAVES = _textured(5, 60, 180), _textured(9, 40, 140, 96)


def _black_to_white(time_s: float) -> Levels:
    return np.full_like(_ROOM, min(255, 255 * time_s / 25))


def _dusk(time_s: float) -> Levels:
    return _ROOM * (1 - 0.6 * time_s / 60)


def _fog(time_s: float) -> Levels:
    share = 0.8 * min(time_s / 40, 1)
    return _ROOM * (1 - share) + 170 * share


def _door(time_s: float) -> Levels:
    """A dark gap that grows by two pixels a second."""
    picture = _ROOM.copy()
    picture[60:200, 100 : 100 + int(2 * time_s)] -= 30
    return picture


def _car(time_s: float) -> Levels:
    """A car that leaves after ten seconds, by four pixels a second."""
    picture = np.full_like(_ROOM, 110)
    left = int(60 + 4 * max(0, time_s - 10))
    picture[120:170, left : left + 70] += 35
    return picture


def _night(time_s: float) -> Levels:
    """Something of level 40 on 16 in another place every second."""
    picture, second = np.full_like(_ROOM, 16), int(time_s)
    top, left = second * 37 % (HEIGHT_PX - 50), second * 53 % (WIDTH_PX - 30)
    picture[top : top + 50, left : left + 30] = 40
    return picture


def _trees(time_s: float) -> Levels:
    picture = np.full_like(_ROOM, 110)
    for top in range(0, len(_LEAVES), _TILE_PX):
        sway_px = round(5 * np.sin(2 * np.pi * time_s / 2.7 + top))
        picture[top : top + _TILE_PX] = np.roll(_LEAVES[top : top + _TILE_PX], sway_px, axis=1)
    return picture


# What is filmed at a time, for how many seconds, and the standard deviation of a pixel's noise in levels.
FOOTAGE: Mapping[str, tuple[Callable[[float], Levels], int, float]] = {
    "black to white in 25 s": (_black_to_white, 30, 2),
    "dusk of a minute": (_dusk, 60, 3),
    "fog": (_fog, 45, 3),
    "a slow door": (_door, 40, 3),
    "a parked car leaves": (_car, 50, 3),
    "40 on 16 at night, jumping": (_night, 26, 5),
    "swaying trees": (_trees, 20, 3),
    "nothing changes": (lambda _: _ROOM, 60, 5),
}


def frames(name: str) -> list[Pixels]:
    """The frames that a live session uses of a film, uint8 [HEIGHT_PX, WIDTH_PX, 3]."""
    scene, seconds, noise = FOOTAGE[name]
    file, random = io.BytesIO(), np.random.default_rng(1)
    with av.open(file, "w", format="matroska") as container:
        options = {"g": str(2 * FPS), "preset": "veryfast", "tune": "zerolatency"}
        stream = container.add_stream("libx264", rate=FPS, options=options)
        stream.width, stream.height, stream.pix_fmt, stream.bit_rate = WIDTH_PX, HEIGHT_PX, "yuv420p", _BITRATE
        for number in range(seconds * FPS):
            levels = scene(number / FPS) + random.normal(0, noise, _ROOM.shape)
            pixels = levels.round().clip(0, 255).astype(np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    file.seek(0)
    with av.open(file, "r") as container:
        decoded = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    return decoded[:: FPS // USED_FPS]
