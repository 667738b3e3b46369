"""Generates real media for tests: H.264 clips, pictures and sounds."""

from __future__ import annotations

import io
import tempfile
import wave
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from av.audio.stream import AudioStream
from av.video.stream import VideoStream
from numpy.typing import NDArray
from PIL import Image


def clip(
    frames: int = 16,
    *,
    fps: int = 4,
    width: int = 112,
    height: int = 112,
    seed: int = 0,
    codec: str = "libx264",
    keyframe_every: int = 250,
) -> bytes:
    """An mp4 of a bright square that moves over a textured ground; its index precedes the frames."""
    ground = _squares(np.random.default_rng(seed), 40, 120, width, height)
    # ffmpeg moves the index to the front only in a file with a name.
    with tempfile.NamedTemporaryFile(suffix=".mp4") as file:
        with av.open(file.name, "w", format="mp4", options={"movflags": "faststart"}) as container:
            stream = container.add_stream(codec, rate=Fraction(fps))
            assert isinstance(stream, VideoStream)
            stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
            stream.codec_context.thread_count = 1
            stream.codec_context.gop_size = keyframe_every
            for index in range(frames):
                picture = ground.copy()
                left = (seed * 13 + 5 * index) % max(1, width - 24)
                picture[height // 3 : height // 3 + 24, left : left + 24] = (250, 60 * (seed % 4), 30)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
            container.mux(stream.encode())
        return Path(file.name).read_bytes()


def with_sound(clip: bytes, samples: NDArray[np.float32], rate: int = 16_000, begin_s: float = 0.0) -> bytes:
    """A Matroska file of a clip's pictures, and of these samples, float32 [N], without loss to 16 bits. begin_s: when
    the first of them is heard."""
    file = io.BytesIO()
    with av.open(io.BytesIO(clip), "r") as pictures, av.open(file, "w", format="matroska") as container:
        video = container.add_stream_from_template(pictures.streams.video[0])
        sound = container.add_stream("flac", rate=rate, layout="mono")
        assert isinstance(sound, AudioStream)
        sound.codec_context.format = "s16"
        for packet in pictures.demux(video=0):
            if packet.size:
                packet.stream = video
                container.mux(packet)
        for first in range(0, samples.size, 4096):
            part = levels(samples[first : first + 4096])[None]
            frame = av.AudioFrame.from_ndarray(part, format="s16", layout="mono")
            frame.sample_rate, frame.time_base = rate, Fraction(1, rate)
            frame.pts = round(begin_s * rate) + first
            container.mux(sound.encode(frame))
        container.mux(sound.encode())
    return file.getvalue()


def sound(samples: NDArray[np.float32], rate: int = 16_000) -> bytes:
    """A WAV of these samples, float32 [N], in 16 bits."""
    file = io.BytesIO()
    with wave.open(file, "wb") as made:
        made.setnchannels(1)
        made.setsampwidth(2)
        made.setframerate(rate)
        made.writeframes(levels(samples).tobytes())
    return file.getvalue()


def chirp(lasts_s: float, seed: int = 0, rate: int = 16_000) -> NDArray[np.float32]:
    """A tone that rises, and some noise: float32 [N], of values that 16 bits have."""
    at = np.arange(round(lasts_s * rate)) / rate
    tone = 0.4 * np.sin(2 * np.pi * (200 + 150 * seed + 300 * at) * at)
    noise = np.random.default_rng(seed).uniform(-0.1, 0.1, at.size)
    return levels((tone + noise).astype(np.float32)).astype(np.float32) / np.float32(2**15)


def levels(samples: NDArray[np.float32]) -> NDArray[np.int16]:
    return (samples * 2**15).round().clip(-(2**15), 2**15 - 1).astype(np.int16)


def picture(width: int, height: int, seed: int = 0) -> bytes:
    """A PNG of random 8-pixel squares."""
    squares = _squares(np.random.default_rng(seed), 0, 255, width, height)
    file = io.BytesIO()
    Image.fromarray(squares).save(file, "PNG")
    return file.getvalue()


def _squares(rng: np.random.Generator, low: int, high: int, width: int, height: int) -> NDArray[np.uint8]:
    squares = rng.integers(low, high, (height // 8 + 1, width // 8 + 1, 3), np.uint8)
    return squares.repeat(8, 0).repeat(8, 1)[:height, :width]


def stream(
    form: str, frames: int = 30, *, fps: int = 10, width: int = 112, height: int = 112, b_frames: int = 2
) -> bytes:
    """A video as a camera sends it, readable without seeking: "fmp4" or "mpegts"."""
    options = {"movflags": "frag_keyframe+empty_moov+default_base_moof"} if form == "fmp4" else {}
    file, ground = io.BytesIO(), _squares(np.random.default_rng(frames), 40, 120, width, height)
    with av.open(file, "w", format="mp4" if form == "fmp4" else form, options=options) as container:
        track = container.add_stream("libx264", rate=Fraction(fps), options={"g": "7", "bf": str(b_frames)})
        track.width, track.height, track.pix_fmt = width, height, "yuv420p"
        track.codec_context.thread_count = 1
        for number in range(frames):
            picture = ground.copy()
            left = 7 * number % (width - 24)
            picture[left : left + 24, 40:64] = (250, 8 * number % 256, 30)
            container.mux(track.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(track.encode())
    return file.getvalue()


def shown(data: bytes, fps: int = 2) -> list[tuple[float, NDArray[np.uint8]]]:
    """Times and pixels of the first frame of each interval of 1 / fps, decoded by PyAV from the whole file."""
    times_s: dict[int, Fraction] = {}
    pixels: list[NDArray[np.uint8]] = []
    with av.open(io.BytesIO(data), "r") as container:
        for frame in container.decode(video=0):
            assert frame.pts is not None
            assert frame.time_base is not None
            time_s = frame.pts * frame.time_base
            interval = int((time_s - next(iter(times_s.values()), time_s)) * fps)
            if interval not in times_s:
                times_s[interval] = time_s
                pixels.append(frame.to_ndarray(format="rgb24").astype(np.uint8, copy=False))
    return list(zip(map(float, times_s.values()), pixels, strict=True))


def png(pixels: NDArray[np.uint8]) -> bytes:
    """A PNG of uint8 [H, W, 3]."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()
