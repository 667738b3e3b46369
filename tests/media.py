"""Generates real media for tests: H.264 clips, audio, pictures, and truncated files."""

from __future__ import annotations

import io
import json
import tempfile
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image


def clip(frames: int = 16, *, fps: int = 4, width: int = 112, height: int = 112, seed: int = 0) -> bytes:
    """An H.264 mp4 of a bright square that moves over a textured ground; its index precedes the frames."""
    with tempfile.NamedTemporaryFile(suffix=".mp4") as file:
        _write_clip(file.name, frames, fps, width, height, seed)
        return Path(file.name).read_bytes()


def _write_clip(path: str, frames: int, fps: int, width: int, height: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    ground = rng.integers(40, 120, (height // 8 + 1, width // 8 + 1, 3), np.uint8).repeat(8, 0).repeat(8, 1)
    with av.open(path, "w", format="mp4", options={"movflags": "faststart"}) as container:
        stream = container.add_stream("libx264", rate=Fraction(fps))
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.codec_context.thread_count = 1
        for index in range(frames):
            picture = ground[:height, :width].copy()
            left = (seed * 13 + 5 * index) % max(1, width - 24)
            picture[height // 3 : height // 3 + 24, left : left + 24] = (250, 60 * (seed % 4), 30)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())


def long_clip() -> bytes:
    """120 s of 1280 × 720 with one keyframe: to show its last frame, all of them must be decoded."""
    file, rate = io.BytesIO(), Fraction(25, 2)
    noise = np.random.default_rng(0).integers(0, 255, (90, 160, 3), np.uint8).repeat(8, 0).repeat(8, 1)
    rolled = [av.VideoFrame.from_ndarray(np.roll(noise, shift, 1), format="rgb24") for shift in range(8)]
    pictures = [each.reformat(format="yuv420p") for each in rolled]
    with av.open(file, "w", format="mp4") as output:
        stream = output.add_stream("libx264", rate=rate, options={"g": "100000", "preset": "ultrafast"})
        stream.width, stream.height, stream.pix_fmt = 1280, 720, "yuv420p"
        for number in range(1500):
            picture = pictures[number % len(pictures)]
            picture.pts, picture.time_base = number, 1 / rate
            output.mux(stream.encode(picture))
        output.mux(stream.encode())
    return file.getvalue()


def clip_without_its_end(frames: int = 64) -> bytes:
    """An mp4 whose index lists frames that are cut off."""
    whole = clip(frames)
    start = whole.index(b"mdat")
    return whole[: start + (len(whole) - start) // 3]


def sound(seconds: float = 1.0) -> bytes:
    """A WAV file: media without any picture."""
    file = io.BytesIO()
    samples = (np.sin(np.arange(int(16_000 * seconds)) / 10) * 9000).astype(np.int16)[None]
    with av.open(file, "w", format="wav") as container:
        stream = container.add_stream("pcm_s16le", rate=16_000, layout="mono")
        frame = av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
        frame.sample_rate = 16_000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


def picture(width: int, height: int, seed: int = 0) -> bytes:
    """A PNG of random 8-pixel squares."""
    rng = np.random.default_rng(seed)
    squares = rng.integers(0, 255, (height // 8 + 1, width // 8 + 1, 3), np.uint8).repeat(8, 0).repeat(8, 1)
    file = io.BytesIO()
    Image.fromarray(squares[:height, :width]).save(file, "PNG")
    return file.getvalue()


def normalised_patches(
    frames: NDArray[np.uint8], checkpoint: Path, patch_px: int, merge: int, temporal_patch: int
) -> torch.Tensor:
    """Frames [F, H, W, 3] as patches of transformers' video processor, float32 [patches, values]."""
    settings = json.loads((checkpoint / "video_preprocessor_config.json").read_text())
    frames = np.concatenate([frames, frames[-1:].repeat(-len(frames) % temporal_patch, 0)])
    mean, std = np.array(settings["image_mean"]), np.array(settings["image_std"])
    values = ((frames / 255 - mean) / std).transpose(0, 3, 1, 2)
    rows, columns = values.shape[2] // patch_px // merge, values.shape[3] // patch_px // merge
    cut = values.reshape(-1, temporal_patch, 3, rows, merge, patch_px, columns, merge, patch_px)
    patches = cut.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(-1, 3 * temporal_patch * patch_px**2)
    return torch.from_numpy(patches).float()
