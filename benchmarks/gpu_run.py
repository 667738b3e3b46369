"""The parameters of a run of `make bench-gpu`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.gpu_device import Peaks
from benchmarks.gpu_models import Target

ROOFLINE, GENERATE = "the roofline", "`generate`"


@dataclass(frozen=True, slots=True)
class Run:
    """folder: the target's checkpoint. rounds: measurements of each configuration, after one warm-up. peaks: of the
    device, measured in this run."""

    target: Target
    folder: Path
    device: torch.device
    dtype: torch.dtype
    rounds: int
    peaks: Peaks
