"""MiniCPM-V's towers against transformers' tower and a plain resampler."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from common.checkpoint import Checkpoint
from common.contract.errors import StartupError
from services.encoder.families import load_tower
from services.encoder.tower.graphs import with_graphs
from services.encoder.tower.packing import TowerShape, lay_out
from tests import minicpm
from tests.encoder.tower_recorder import Recorder, load_packed

CPU = torch.device("cpu")
SIZES = [(56, 70), (14, 14), (28, 112), (56, 70), (98, 42)]


def pictures() -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randint(0, 255, (1, *size, 3), dtype=torch.uint8, generator=random) for size in SIZES]


@pytest.mark.parametrize("version", minicpm.QUERIES)
def test_pictures_of_any_size_become_the_tokens_of_the_plain_resampler(version: str, tmp_path: Path) -> None:
    oracle = minicpm.write(tmp_path, 1, version)
    tower = load_tower(Checkpoint(tmp_path), "float32", CPU)
    for ours, pixels in zip(tower.encode(pictures()), pictures(), strict=True):
        with torch.no_grad():
            theirs = oracle.picture(pixels[0])
        assert ours.shape == (1, minicpm.QUERIES[version], minicpm.WIDTH)
        torch.testing.assert_close(ours[0], theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("side", [5, 70])
def test_patches_are_placed_in_cells_as_in_transformers(side: int) -> None:
    borders = torch.arange(1 / side, 1.0, 1 / side)
    for length in range(1, 140):
        layout = lay_out([(length, 3)], TowerShape(1, cell_side=side))
        begins = torch.clamp(torch.arange(length, dtype=torch.float32) * (1.0 / torch.tensor(length)), max=1.0 - 1e-6)
        expected = torch.bucketize(begins, borders, right=True).tolist()
        assert layout.cells is not None
        assert (layout.cells.reshape(length, 3)[:, 0] // side).tolist() == expected


def test_graphs_replay_what_the_tower_computes(tmp_path: Path) -> None:
    minicpm.write(tmp_path, 1)
    tower, recorder = load_packed(tmp_path), Recorder()
    graphed = with_graphs(tower, 160, recorder)
    recorder.replayed.clear()
    for ours, theirs in zip(graphed.encode(pictures()), tower.encode(pictures()), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=0)
    assert recorder.replayed


def test_the_last_layer_can_be_left_out(tmp_path: Path) -> None:
    oracle = minicpm.write(tmp_path, 1, changes={"drop_vision_last_layer": True})
    del oracle.vpm.encoder.layers[-1]
    tower = load_tower(Checkpoint(tmp_path), "float32", CPU)
    with torch.no_grad():
        torch.testing.assert_close(tower.encode(pictures())[0][0], oracle.picture(pictures()[0][0]), atol=1e-5, rtol=0)


def test_a_missing_weight_is_named(tmp_path: Path) -> None:
    minicpm.write(tmp_path, 1, changes={"query_num": 5})
    with pytest.raises(StartupError, match=r"resampler\.query has the shape"):
        load_tower(Checkpoint(tmp_path), "float32", CPU)
