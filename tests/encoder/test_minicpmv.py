"""MiniCPM-V's towers against transformers' tower and a plain resampler."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.families.minicpm.cells import Cells
from gridsieve.families.minicpm.tower import time_number
from gridsieve.services.encoder.tower.loading import load_tower
from gridsieve.services.encoder.tower.packing import Side, TowerShape, lay_out
from gridsieve.services.encoder.tower.patches import TimedFrames
from tests.encoder.tower_recorder import assert_replays
from tests.families import minicpm

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


def test_a_group_costs_as_much_as_its_frames(tmp_path: Path) -> None:
    minicpm.write(tmp_path, 1, "4.5")
    tower = load_tower(Checkpoint(tmp_path), "float32", CPU)
    assert tower.cost((6, 56, 70, 3)) == 6 * tower.cost((1, 56, 70, 3)) < tower.cost((1, 6 * 56, 70, 3))


@pytest.mark.parametrize("side", [5, 70])
def test_patches_are_placed_in_cells_as_published(side: int) -> None:
    borders = torch.arange(1 / side, 1.0, 1 / side)
    for length in range(1, 600):
        rows = torch.tensor([[length, 3]], dtype=torch.int32)[0][0]  # as the published code has it
        expected = torch.bucketize(torch.arange(0, 1 - 1e-6, (1 / rows).item()), borders, right=True).tolist()
        layout = lay_out([Side(length, 3)], TowerShape(1, table=Cells(side)))
        assert (layout.by_row["cells"].reshape(length, 3)[:, 0] // side).tolist() == expected
        in_a_row = lay_out([Side(length, 1)], TowerShape(1, table=Cells(side, in_a_row=True)))
        assert in_a_row.by_row["cells"].tolist() == expected


def groups() -> list[Tensor | TimedFrames]:
    """Groups of frames of several sizes, and pictures between them."""
    random = torch.Generator().manual_seed(1)
    shapes: list[tuple[int, int, int]] = [(2, 56, 70), (1, 28, 42), (2, 56, 70), (3, 14, 28)]
    drawn = [torch.randint(0, 255, (*shape, 3), dtype=torch.uint8, generator=random) for shape in shapes]
    timed = [TimedFrames(each, tuple(range(7, 7 + 3 * len(each), 3))) for each in drawn]
    return [timed[0], pictures()[0], *timed[1:], pictures()[2]]


def of_group(oracle: minicpm.MiniCPM, group: Tensor | TimedFrames) -> Tensor:
    with torch.no_grad():
        if isinstance(group, TimedFrames):
            return oracle.group(group.frames, group.times)
        return oracle.picture(group[0])


def test_the_frames_of_a_group_become_its_tokens_together(tmp_path: Path) -> None:
    oracle = minicpm.write(tmp_path, 1, "4.5")
    tower = load_tower(Checkpoint(tmp_path), "float32", CPU)
    for ours, group in zip(tower.encode(groups()), groups(), strict=True):
        assert ours.shape == (1, minicpm.QUERIES["4.5"], minicpm.WIDTH)
        torch.testing.assert_close(ours[0], of_group(oracle, group), atol=1e-5, rtol=0)


def test_graphs_keep_groups_together(tmp_path: Path) -> None:
    minicpm.write(tmp_path, 1, "4.5")
    assert_replays(tmp_path, groups(), 1280)  # up to 10 frames


@given(st.integers(1, 400), st.fractions(1, 60, max_denominator=30))
def test_times_are_numbered_as_published(frames: int, rate: Fraction) -> None:
    times = [float(index / rate) for index in range(frames)]
    # The published scale ends with the video; frames that are sampled as published are nearer to none after it.
    scale = np.arange(0, float(frames / rate) + 0.1, 0.1)
    nearest = scale[np.abs(np.array(times)[:, None] - scale).argmin(axis=1)]
    assert [time_number(time) for time in times] == (nearest / 0.1).astype(np.int32).tolist()


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
