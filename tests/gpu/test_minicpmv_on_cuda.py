"""MiniCPM-V's tower on CUDA: graphs keep groups of frames together, and the kernel takes the resampler's queries."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.services.encoder.tower import graphs
from gridsieve.services.encoder.tower.attention import Resampling, find_attention
from gridsieve.services.encoder.tower.graphs import TowerGraphs, with_graphs
from gridsieve.services.encoder.tower.loading import load_tower
from gridsieve.services.encoder.tower.patches import TimedFrames
from tests.families import minicpm

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0),
    reason="no CUDA device with variable-length attention",
)

# Frames, height and width of groups.
GROUPS = [(3, 56, 70), (1, 28, 42), (3, 56, 70), (2, 42, 42), (6, 14, 28)]


def test_replayed_groups_equal_the_eager_forward_and_the_oracle(tmp_path: Path) -> None:
    oracle = minicpm.write(tmp_path, 1, "4.5")
    random = torch.Generator().manual_seed(1)
    frames = [torch.randint(0, 255, (*shape, 3), dtype=torch.uint8, generator=random) for shape in GROUPS]
    groups = [TimedFrames(each, tuple(range(7, 7 + 3 * len(each), 3))) for each in frames]
    tower = load_tower(Checkpoint(tmp_path), "bfloat16", torch.device("cuda"), "varlen")
    graphed = with_graphs(tower, 2304)  # up to 18 frames
    assert isinstance(graphed.forward, TowerGraphs)
    with patch.object(graphs, "pays", return_value=True):
        replayed = graphed.encode(groups)
    for ours, eager, group in zip(replayed, tower.encode(groups), groups, strict=True):
        torch.testing.assert_close(ours, eager, atol=0.1, rtol=0.1)
        with torch.no_grad():
            exact = oracle.group(group.frames, group.times)
        assert torch.cosine_similarity(ours[0].float().cpu(), exact, dim=-1).min() > 0.99


@pytest.mark.parametrize("resampling", [Resampling(64, 28, 128), Resampling(96, 32, 128)])  # of 2.6, and of 2.5
def test_the_variable_length_kernel_is_correct_for_the_resampler(resampling: Resampling) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        assert find_attention("varlen", torch.device("cuda"), dtype, 16, 72, resampling)
