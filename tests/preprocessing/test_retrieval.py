"""Frames and sizes of Qwen3-VL-Embedding and -Reranker: those of the published scripts, which sample and resize with
qwen-vl-utils, and not with transformers' processors."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.services.preprocessing.layouts.family import Family, load_family
from gridsieve.services.preprocessing.video.sampling import FrameSampling
from tests.families import write_qwen3_vl_reader

FACTOR = 32


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return load_family(Checkpoint(write_qwen3_vl_reader(tmp_path_factory.mktemp("embedder"), 3, "Pooling")))


def test_an_even_number_of_frames_a_second_apart_is_read_4_to_64(family: Family) -> None:
    counts = set()
    for rate in (Fraction(30000, 1001), Fraction(25), Fraction(24), Fraction(10), Fraction(1)):
        for total in (*range(1, 140), 997, 1000, 1500, 1501, 2999, 12345, 107892, 500_001):
            frames = max(total / float(rate), 4)  # at one a second
            frames = math.floor(min(frames, 64, total) / 2) * 2
            expected = torch.linspace(0, total - 1, frames).round().long().tolist() if frames else [0]
            assert list(family.sample_indices(total, rate, family.frame_bounds.merged(FrameSampling()))) == expected
            counts.add(frames)
    assert counts >= {0, 2, 4, 6, 38, 64}


def smart_resize(height: int, width: int, least: int, most: int) -> tuple[int, int]:
    """qwen-vl-utils' formula, with bounds in tokens."""
    low, high = least * FACTOR**2, most * FACTOR**2
    rows, columns = (max(FACTOR, round(side / FACTOR) * FACTOR) for side in (height, width))
    if rows * columns > high:
        shrink = math.sqrt(height * width / high)
        return tuple(math.floor(side / shrink / FACTOR) * FACTOR for side in (height, width))
    if rows * columns < low:
        grow = math.sqrt(low / (height * width))
        return tuple(math.ceil(side * grow / FACTOR) * FACTOR for side in (height, width))
    return rows, columns


@pytest.mark.parametrize("size", [(32, 32), (48, 64), (97, 31), (240, 426), (720, 1280), (1080, 1920), (2160, 3840)])
def test_frames_have_128_to_768_tokens_each_and_images_4_to_1800(family: Family, size: tuple[int, int]) -> None:
    sizes = [family.video_size(*size, frames, FrameSampling()) for frames in (2, 20, 64)]
    assert sizes == [smart_resize(*size, 128, 768)] * 3
    assert family.image(*size, FrameSampling(), 0, 1).frames.size_px == smart_resize(*size, 4, 1800)
