"""The model's input of a scene: its clip, decoded, sampled and resized as preprocessing does it.

Source of sampling and resizing: transformers' Qwen2VLVideoProcessor at 2 frames per second, with Pillow's bicubic.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path

import av
import numpy as np
from PIL import Image

from demo.checkpoint import SAMPLE_FPS
from demo.drawing import Pixels, encode
from demo.scenes import DURATION_S, Scene, kind_of, random_scene

FRAMES = DURATION_S * SAMPLE_FPS
SIDE_PX = 112
# Training, validation and evaluation use disjoint seeds: from these on, by default so many.
TRAINING_SEEDS, TRAINING_CLIPS = 0, 4000
VALIDATION_SEEDS, VALIDATION_CLIPS = 1_000_000, 120
EVALUATION_SEEDS, EVALUATION_CLIPS = 5_000_000, 416


def scene_of(seed: int) -> Scene:
    """The scene of a seed of training, validation or evaluation."""
    return random_scene(seed, kind_of(seed))


def sample(clip: bytes) -> Pixels:
    """The sampled frames of a clip: uint8 [FRAMES, 3, SIDE_PX, SIDE_PX]."""
    with av.open(io.BytesIO(clip), "r") as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        frames = list(container.decode(stream))
    wanted = np.arange(0, len(frames), len(frames) / FRAMES).astype(int)
    return np.stack([_resized(frames[index]) for index in wanted])


def _resized(frame: av.VideoFrame) -> Pixels:
    picture: Image.Image = frame.to_image()
    image = picture.resize((SIDE_PX, SIDE_PX), Image.Resampling.BICUBIC)
    return np.asarray(image, np.uint8).transpose(2, 0, 1)


def cached_clips(folder: Path, seeds: Sequence[int], workers: int = 1) -> Pixels:
    """The sampled clips of `seeds`, rendered on the first call and cached on disk: uint8 [n, FRAMES, 3, H, W]."""
    path = folder / f"scenes-{seeds[0]}-{len(seeds)}.npy"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        shape = (len(seeds), FRAMES, 3, SIDE_PX, SIDE_PX)
        clips = np.lib.format.open_memmap(unfinished, mode="w+", dtype=np.uint8, shape=shape)
        with get_context("spawn").Pool(workers) as pool:
            for index, clip in enumerate(pool.imap(clip_of, seeds, chunksize=8)):
                clips[index] = clip
                if index % 200 == 0:
                    print(f"rendered {index} of {len(seeds)} clips", flush=True)
        clips.flush()
        unfinished.rename(path)
    found: Pixels = np.load(path, mmap_mode="r")
    return found


def clip_of(seed: int) -> Pixels:
    """The sampled clip of one seed."""
    return sample(encode(scene_of(seed)))
