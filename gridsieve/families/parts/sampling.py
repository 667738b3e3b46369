"""Frames of a video, for families whose processors spread so many over all of it.

Source: `BaseVideoProcessor.sample_frames` and the processors of transformers 5.24, index for index.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from gridsieve.services.preprocessing.video.sampling import FrameBounds


def count_of(total_frames: int, average_rate: Fraction, bounds: FrameBounds) -> int:
    """How many frames are sampled: as many as are asked for, else those of `fps` within the other bounds."""
    wanted = int(total_frames / float(average_rate) * bounds.fps)
    frames = bounds.num_frames or min(max(wanted, bounds.min_frames), bounds.max_frames)
    return max(1, min(frames, total_frames))


def from_first_to_last(total_frames: int, count: int) -> tuple[int, ...]:
    """Evenly spaced indices, of one frame the first."""
    return tuple(np.linspace(0, total_frames - 1, count).round().astype(int).tolist())


def firsts_of_shares(total_frames: int, count: int) -> tuple[int, ...]:
    """The first of each of evenly divided shares."""
    return tuple(number * total_frames // count for number in range(count))
