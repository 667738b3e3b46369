"""What a slice is said to cost is what torch counts of a tower's forward, of any family."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from common.checkpoint import Checkpoint
from services.encoder.families import load_tower
from services.encoder.tower.tower import Tower
from tests.families import FAMILIES


@pytest.fixture(scope="module")
def tower(family_checkpoint: Path) -> Tower:
    return load_tower(Checkpoint(family_checkpoint), "float32", torch.device("cpu"))


# Whole windows: of 4 by 4 tokens in the tiny checkpoint that has any.
@pytest.mark.parametrize(("rows", "columns"), [(4, 4), (8, 4), (12, 8), (2, 2)])
def test_a_slice_costs_what_torch_counts(tower: Tower, family: str, rows: int, columns: int) -> None:
    shape = FAMILIES[family]
    frames = torch.zeros(shape.temporal_patch, rows * shape.token_px, columns * shape.token_px, 3, dtype=torch.uint8)
    # As products of matrices: fused attention on the CPU is not counted.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counted:
        tower.encode([frames])
    assert counted.get_total_flops() == 2 * tower.cost(rows * columns)
