"""The tower of MiniCPM-V 4.6 and 4.7 against transformers', and images whose slices have more tokens than the whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers.vision_utils import get_vision_nearest_position_ids

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.common.contract.plan import FrameShape, Grid, MediaPlan, Modality, Run
from gridsieve.families.minicpm.cells import Cells
from gridsieve.services.encoder.tower.loading import load_tower
from gridsieve.services.encoder.tower.packing import Side, TowerShape, lay_out
from tests.adapters import write_adapter
from tests.encoder.test_adapters import CONFIG, adapted, assert_close
from tests.encoder.test_kept_frames import kept_frames
from tests.encoder.tower_recorder import assert_replays, load_packed
from tests.families import QWEN3_5
from tests.families import minicpmv4_6 as oracle
from tests.generation.checkpoints import changed

CPU = torch.device("cpu")
DEEP = pytest.mark.deep
DEEP_KINDS = [("minicpmv4_7", "16x"), ("minicpmv4_6", "4x")]
# Heights and widths in tokens; equal neighbours are attended to together.
SIDES = [(2, 3), (1, 1), (1, 4), (2, 3), (2, 3), (4, 2)]


def pictures(token_px: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    return [
        torch.randint(0, 255, (1, rows * token_px, columns * token_px, 3), dtype=torch.uint8, generator=random)
        for rows, columns in SIDES
    ]


@pytest.mark.parametrize(
    ("model_type", "mode"), [("minicpmv4_6", "16x"), *(pytest.param(*kind, marks=DEEP) for kind in DEEP_KINDS)]
)
def test_pictures_become_the_tokens_of_transformers(model_type: str, mode: str, tmp_path: Path) -> None:
    model = oracle.write(tmp_path, 1, QWEN3_5["text"], model_type, mode)
    tower = load_tower(Checkpoint(tmp_path), "float32", CPU)
    shown = pictures(tower.patches.token_px)
    theirs = oracle.features(model, [each[0] for each in shown])
    for ours, expected, (rows, columns) in zip(tower.encode(shown), theirs, SIDES, strict=True):
        assert ours.shape == (1, rows * columns, QWEN3_5["text"]["hidden_size"])
        torch.testing.assert_close(ours[0], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("model_type", "mode"), [("minicpmv4_6", "16x"), *(pytest.param(*kind, marks=DEEP) for kind in DEEP_KINDS)]
)
def test_every_linear_layer_adds_what_peft_adds(model_type: str, mode: str, tmp_path: Path) -> None:
    model = oracle.write(tmp_path / "model", 1, QWEN3_5["text"], model_type, mode)
    with_peft = write_adapter(model, tmp_path / "adapter", **CONFIG)
    tower, digest = adapted(load_tower(Checkpoint(tmp_path / "model"), "float32", CPU), tmp_path / "adapter")
    shown = pictures(tower.patches.token_px)
    expected = oracle.features(with_peft, [each[0] for each in shown])
    for ours, theirs, plain in zip(tower.encode(shown, digest), expected, tower.encode(shown), strict=True):
        assert_close(ours[0], theirs, plain[0])


@pytest.mark.parametrize("mode", ["16x", pytest.param("4x", marks=DEEP)])
def test_tokens_that_are_chosen_before_the_tower_see_each_other_alone(mode: str, tmp_path: Path) -> None:
    """Beside others, some of which are whole."""
    model = oracle.write(tmp_path, 1, QWEN3_5["text"], mode=mode)
    tower = load_tower(Checkpoint(tmp_path), "float32", CPU)
    token_px, shown = tower.patches.token_px, pictures(tower.patches.token_px)
    chosen = [None, [0], [1, 3], [0, 2, 5], [4], list(range(8))]
    given = [kept_frames(each, kept, token_px) if kept else each for each, kept in zip(shown, chosen, strict=True)]
    for ours, picture, kept in zip(tower.encode(given), shown, chosen, strict=True):
        every = range(picture.shape[1] * picture.shape[2] // token_px**2)
        expected = oracle.kept_features(model, picture[0], kept or every, tower.patches.merge)
        torch.testing.assert_close(ours[0], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("mode", ["16x", pytest.param("4x", marks=DEEP)])
def test_graphs_replay_what_the_tower_computes(mode: str, tmp_path: Path) -> None:
    oracle.write_tiny(tmp_path, 1, mode=mode)
    token_px = load_packed(tmp_path).patches.token_px
    chosen = kept_frames(pictures(token_px)[0], [1, 3], token_px)
    assert_replays(tmp_path, [*pictures(token_px), chosen], 64)


def test_patches_are_placed_in_cells_as_by_transformers() -> None:
    for side in (oracle.CELLS, 70):
        for length in range(1, 600):
            expected = get_vision_nearest_position_ids(torch.tensor([[length, 3]]), side).tolist()
            layout = lay_out([Side(length, 3)], TowerShape(1, table=Cells(side, by_quotient=True)))
            assert layout.by_row["cells"].tolist() == expected


def an_image(frames: FrameShape, tokens: int) -> MediaPlan:
    return MediaPlan(Modality.IMAGE, Grid(1, 1, tokens), (Run(1, tokens),), frames, None, (), bytes(32))


def test_frames_that_do_not_make_their_grid_are_refused(tmp_path: Path) -> None:
    oracle.write_tiny(tmp_path, 1)
    arrange = load_tower(Checkpoint(tmp_path), "float32", CPU).arrangement
    sliced = FrameShape(3, (56, 112), tile_px=(112, 112), tile_columns=2)
    assert [arrange(an_image(sliced, 10)).tokens_before(index) for index in range(4)] == [0, 2, 6, 10]
    for wrong in (an_image(sliced, 9), an_image(replace(sliced, tile_px=(112, 100)), 10)):
        with pytest.raises(ValueError, match=r"are not|no multiples of a token"):
            arrange(wrong)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"insert_layer_id": 4}, "insert_layer_id 4 is none of the tower's 4 layers"),
        ({"downsample_mode": "8x"}, "downsample_mode '8x' is not supported"),
    ],
)
def test_towers_that_merge_otherwise_are_refused(tmp_path: Path, changes: dict[str, object], named: str) -> None:
    folder = changed(oracle.write_tiny(tmp_path / "written", 1), tmp_path / "changed", **changes)
    with pytest.raises(StartupError, match=named):
        load_tower(Checkpoint(folder), "float32", CPU)
