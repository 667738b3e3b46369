"""What a slice is said to cost is what torch counts of a tower's forward, of any family."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from common.checkpoint import Checkpoint
from services.encoder.families import load_tower
from services.encoder.tower.cost import TowerSizes, slice_cost
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


def test_attention_over_a_slice_is_quadratic_and_the_rest_is_not() -> None:
    sizes = TowerSizes(
        hidden=3, patch_weights=100, token_weights=1000, full_layers=2, windowed_layers=5, window_patches=8
    )
    # 40 patches: 40·100 + 10·1000 + 2·3·40·(2·40 + 5·8)
    assert slice_cost(sizes, tokens=10, patches=40) == 42_800
    assert slice_cost(sizes, tokens=1, patches=4) == 400 + 1000 + 2 * 3 * 4 * (2 * 4 + 5 * 4)
    doubled, once = slice_cost(sizes, 20, 80), slice_cost(sizes, 10, 40)
    assert doubled - 2 * once == 2 * 3 * 2 * 2 * 40 * 40
