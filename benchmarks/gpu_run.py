"""The parameters of a run of `make bench-gpu`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.gpu_models import Target


@dataclass(frozen=True, slots=True)
class Run:
    """folder: the target's checkpoint. rounds: measurements of each configuration, after one warm-up."""

    target: Target
    folder: Path
    device: torch.device
    dtype: torch.dtype
    rounds: int
