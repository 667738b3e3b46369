"""Generates real media for tests: H.264 clips and pictures."""

from __future__ import annotations

import io
import tempfile
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from numpy.typing import NDArray
from PIL import Image


def clip(frames: int = 16, *, fps: int = 4, width: int = 112, height: int = 112, seed: int = 0) -> bytes:
    """An H.264 mp4 of a bright square that moves over a textured ground; its index precedes the frames."""
    ground = _squares(np.random.default_rng(seed), 40, 120, width, height)
    # ffmpeg moves the index to the front only in a file with a name.
    with tempfile.NamedTemporaryFile(suffix=".mp4") as file:
        with av.open(file.name, "w", format="mp4", options={"movflags": "faststart"}) as container:
            stream = container.add_stream("libx264", rate=Fraction(fps))
            stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
            stream.codec_context.thread_count = 1
            for index in range(frames):
                picture = ground.copy()
                left = (seed * 13 + 5 * index) % max(1, width - 24)
                picture[height // 3 : height // 3 + 24, left : left + 24] = (250, 60 * (seed % 4), 30)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
            container.mux(stream.encode())
        return Path(file.name).read_bytes()


def picture(width: int, height: int, seed: int = 0) -> bytes:
    """A PNG of random 8-pixel squares."""
    squares = _squares(np.random.default_rng(seed), 0, 255, width, height)
    file = io.BytesIO()
    Image.fromarray(squares).save(file, "PNG")
    return file.getvalue()


def _squares(rng: np.random.Generator, low: int, high: int, width: int, height: int) -> NDArray[np.uint8]:
    squares = rng.integers(low, high, (height // 8 + 1, width // 8 + 1, 3), np.uint8)
    return squares.repeat(8, 0).repeat(8, 1)[:height, :width]
