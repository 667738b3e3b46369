"""The clips of the benchmarks: textured and moving, with keyframes at given distances, or scenes of the demo."""

from __future__ import annotations

import io
import itertools
import struct
import tempfile
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Literal, TypeAlias

import av
import numpy as np
from numpy.typing import NDArray

from demo.drawing import encode
from demo.scenes import random_scene

Codec: TypeAlias = Literal["libx264", "mjpeg"]

RATE = 30
_FILES = itertools.count()
FIRST_SEED = 9_000_000
_H264 = {"preset": "veryfast", "sc_threshold": "0", "bf": "2"}
# By codec: the file's suffix, the pixels' format and the encoder's options.
_CODECS: Mapping[Codec, tuple[str, str, Mapping[str, str]]] = {
    "libx264": (".mp4", "yuv420p", _H264),
    "mjpeg": (".mkv", "yuvj420p", {"qmin": "2", "qmax": "2"}),
}


def clip(
    frames: int,
    height_px: int,
    width_px: int,
    keyframe_every: int = 1,
    fps: int = RATE,
    codec: Codec = "libx264",
    bit_rate: int | None = None,
) -> bytes:
    """An mp4 file of H.264 with B-frames and a keyframe at every `keyframe_every` frames only, or Motion JPEG.

    bit_rate: bits a second, on average; None: those of constant quality.
    """
    suffix, pix_fmt, options = _CODECS[codec]
    with tempfile.NamedTemporaryFile(suffix=suffix) as file:
        with av.open(file.name, "w", options={"movflags": "faststart"} if suffix == ".mp4" else {}) as container:
            stream = container.add_stream(codec, rate=fps)
            stream.height, stream.width, stream.pix_fmt = height_px, width_px, pix_fmt
            if bit_rate is not None:
                stream.bit_rate = bit_rate
            stream.options = {**options, "g": str(keyframe_every), "keyint_min": str(keyframe_every)}
            for picture in pictures(frames, height_px, width_px):
                container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
            container.mux(stream.encode())
        return Path(file.name).read_bytes()


def write_repeated(path: Path, data: bytes, times: int, fps: int) -> None:
    """Writes the packets of an mp4 file over and over, into one file."""
    with av.open(io.BytesIO(data), "r") as original, av.open(str(path), "w") as output:
        video = original.streams.video[0]
        stream = output.add_stream_from_template(video)
        packets = [packet for packet in original.demux(video) if packet.size]
        stored = [(packet.pts or 0, packet.dts or 0) for packet in packets]
        ticks = int(Fraction(len(packets), fps) / packets[0].time_base)
        for later in range(0, times * ticks, ticks):
            for packet, (pts, dts) in zip(packets, stored, strict=True):
                packet.pts, packet.dts = pts + later, dts + later
                packet.stream = stream
                output.mux(packet)


def scene_clip(number: int) -> bytes:
    """A clip as the demo's, of a scene that no training used."""
    return encode(random_scene(FIRST_SEED + number))


def another_file(data: bytes, size_bytes: int = 0) -> bytes:
    """The same clip with different bytes, unknown to every cache, of at least so many: an mp4 box that readers skip is
    appended."""
    content = struct.pack(">Q", next(_FILES)).ljust(size_bytes - len(data) - 8, b"\0")
    return data + struct.pack(">I4s", 8 + len(content), b"free") + content


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
