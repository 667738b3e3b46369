"""One run of `make bench-gpu`: what is measured, where, and how often."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.gpu_models import Target


@dataclass(frozen=True, slots=True)
class Run:
    """folder: the target's checkpoint. rounds: measurements of each configuration, after one that is not counted."""

    target: Target
    folder: Path
    device: torch.device
    dtype: torch.dtype
    rounds: int
