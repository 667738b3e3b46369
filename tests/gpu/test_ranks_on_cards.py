"""A tower with two ranks on two cards computes what one of them computes alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gridsieve.services.encoder.settings import EncoderSettings
from gridsieve.services.encoder.startup.build import parallel_tower
from tests.families import FAMILIES

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices on this machine")


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 5e-2)])
def test_two_cards_encode_as_one(family: str, family_checkpoint: Path, dtype: str, tolerance: float) -> None:
    flags = ["--model", str(family_checkpoint), "--device", "cuda", "--data-parallel", "2", "--dtype", dtype]
    side_px, random = FAMILIES[family].token_px, torch.Generator().manual_seed(0)
    sides = [(4, 4), (4, 4), (2, 6), (8, 8), (1, 1), (8, 8), (3, 5)]
    shapes = [(2, rows * side_px, columns * side_px, 3) for rows, columns in sides]
    slices = [torch.randint(0, 256, shape, dtype=torch.uint8, generator=random) for shape in shapes]
    with parallel_tower(EncoderSettings.load(flags)) as towers:
        for count in (7, 1, 2, 5):
            together, alone = towers.encode(slices[:count]), towers.own.encode(slices[:count])
            for one, other in zip(together, alone, strict=True):
                assert one.device == torch.device("cuda:0")
                torch.testing.assert_close(one, other, atol=tolerance, rtol=0)
        assert towers.rank_failure.cause is None
