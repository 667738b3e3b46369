"""GLM-4.6V: as GLM-4.5V, but a video's length says how densely it is sampled, and timestamps have tenths of a second.

    up to      frames a second
    30 s       6
    5 min      2
    longer     1, at most 640

Published checkpoints have the model types of GLM-4.1V and 4.5V: the processors that they name tell them apart.
Source: `Glm46VProcessor` and `Glm46VVideoProcessor` of transformers 5.24.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.services.preprocessing.families.glm4v import Glm4V
from gridsieve.services.preprocessing.video.sampling import FrameBounds

_BY_LENGTH = 0.0
_MAX_FRAMES, _MAX_LENGTH_S = 640, 2400.0
_SLICES_PER_S = ((30.0, 3.0), (300.0, 1.0), (math.inf, 0.5))


def load(checkpoint: Checkpoint) -> Glm4V:
    """The settings of a checkpoint of either kind. Raises StartupError as `from_checkpoint`."""
    named = (
        checkpoint.processor("image"),
        checkpoint.processor("video"),
        checkpoint.read_json("processor_config.json"),
    )
    names = [str(each.get(key)) for each in named for key in ("processor_class", "video_processor_type")]
    known = [name for name in names if name.startswith("Glm")]
    is_new = any(name.startswith("Glm46V") for name in known) if known else checkpoint.model_type == "glm46v"
    return (Glm46V if is_new else Glm4V).from_checkpoint(checkpoint)


@dataclass(frozen=True, slots=True, kw_only=True)
class Glm46V(Glm4V):
    """The settings of one checkpoint."""

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Self:
        """Raises StartupError for settings that are not supported or contradict each other."""
        return cls.read_own(checkpoint, _BY_LENGTH, math.inf)

    def own_indices(self, total_frames: int, rate: float, bounds: FrameBounds) -> Sequence[int]:
        """Those of transformers, whatever their number; of a request that says how many a second, as GLM-4.5V's."""
        if bounds.fps != _BY_LENGTH:
            return Glm4V.own_indices(self, total_frames, rate, bounds)
        length_s = total_frames / rate
        seconds = min(length_s, _MAX_LENGTH_S)
        per_s = bounds.temporal_patch * next(slices for length, slices in _SLICES_PER_S if seconds <= length)
        wanted = min(int(seconds * per_s), _MAX_FRAMES)
        if not wanted:  # transformers takes none
            return [0]
        found = [0, total_frames - 1]
        if total_frames >= wanted:
            found = _every(1 / per_s, int(length_s), total_frames, 1 / rate)
        if total_frames < wanted or len(found) < wanted:
            found = np.linspace(found[0], found[-1], wanted, dtype=int).tolist()
        elif len(found) > wanted:
            found = np.linspace(0, total_frames - 1, wanted, dtype=int).tolist()
        return list(dict.fromkeys(found))

    def time_text(self, seconds: float) -> str:
        """The text after a slice whose first frame is shown then."""
        return f"{seconds:.1f} seconds"


def _every(step_s: float, length_s: int, total_frames: int, frame_s: float) -> list[int]:
    """The first frame at or after each multiple of `step_s`, at most one for each, until `length_s`.

    Multiples are sums, which round as those of transformers, whose loop looks at each frame.
    """
    found: list[int] = []
    frame, wanted_s = 0, 0.0
    while True:
        frame = max(frame, math.floor(wanted_s / frame_s) - 1)
        while frame < total_frames and frame * frame_s < wanted_s:
            frame += 1
        if frame >= total_frames:
            return found
        found.append(frame)
        wanted_s += step_s
        if wanted_s >= length_s:
            return found
        frame += 1
