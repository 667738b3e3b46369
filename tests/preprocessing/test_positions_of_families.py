"""A plan's tokens stand where transformers' own model would put them, whatever the mix, in the runs of its family."""

from __future__ import annotations

from fractions import Fraction
from importlib import import_module
from pathlib import Path

import pytest
import torch

from common.checkpoint import Checkpoint
from common.contract.plan import Modality, PromptPlan
from services.preprocessing.planner import MediaRequest, Planner
from tests.families import FAMILIES
from tests.preprocessing.planner_asks import image, picture, planned, video
from tests.preprocessing.preprocessing_media import clip


@pytest.fixture(scope="module")
def tiny(family_checkpoint: Path) -> Planner:
    """A planner of each family in turn."""
    return Planner(Checkpoint(family_checkpoint), None)


def test_positions_follow_the_formula_from_the_time_base_on(tiny_checkpoint: Path) -> None:
    plan = planned(Planner(Checkpoint(tiny_checkpoint), None), "look", video(clip(120, rate=24)), "so?").plan
    (item,) = plan.media
    (run,) = item.runs
    # 120 frames at 24 a second are 5 s: 10 frames sampled, 5 slices, 1 s each, 2 tokens a second.
    assert (item.seconds_per_grid, item.grid.t) == (Fraction(1), 5)
    start = run.offset
    expected = [
        (start + 2 * i, start + j, start + k) for i in range(5) for j in range(item.grid.h) for k in range(item.grid.w)
    ]
    assert plan.positions[:, run.offset : run.end].T.tolist() == [list(each) for each in expected]
    after = max(map(max, expected)) + 1
    text = plan.tokens - run.end
    assert plan.positions[:, run.end :].tolist() == [list(range(after, after + text))] * 3
    assert plan.positions[:, : run.offset].tolist() == [list(range(run.offset))] * 3


def rope_index(family: str, checkpoint: Path, plan: PromptPlan) -> list[list[int]]:
    """transformers' positions [3, N] of a plan's ids and grids."""
    model_class = FAMILIES[family].model
    config = model_class.config_class.from_pretrained(checkpoint)
    vision = config.vision_config
    inner = vars(import_module(model_class.__module__))[
        model_class.__name__.replace("ForConditionalGeneration", "Model")
    ]
    model = inner.__new__(inner)
    torch.nn.Module.__init__(model)
    model.config = config
    types = torch.zeros(1, plan.tokens, dtype=torch.long)
    for item in plan.media:
        for run in item.runs:
            types[0, run.offset : run.end] = 2 if item.modality is Modality.VIDEO else 1

    def grids(modality: Modality) -> torch.Tensor | None:
        side = vision.spatial_merge_size
        found = [
            (item.grid.t, item.grid.h * side, item.grid.w * side) for item in plan.media if item.modality is modality
        ]
        return torch.tensor(found) if found else None

    videos = [item for item in plan.media if item.modality is Modality.VIDEO]
    positions, _ = model.get_rope_index(
        torch.zeros_like(types),
        mm_token_type_ids=types,
        image_grid_thw=grids(Modality.IMAGE),
        video_grid_thw=grids(Modality.VIDEO),
        second_per_grid_ts=torch.tensor([float(item.seconds_per_grid or 0) for item in videos]) if videos else None,
    )
    found: list[list[int]] = positions[:, 0].tolist()
    return found


def test_positions_are_those_of_transformers(family: str, tiny: Planner, family_checkpoint: Path) -> None:
    png, brief = picture(90, 60), clip(8, rate=8)
    mixes: list[tuple[str | MediaRequest, ...]] = [
        (image(png), video(brief, fps=8.0), "what?"),
        ("so " * 300, video(clip(1)), video(brief), "and", image(png)),
        tuple(image(picture(30 + 20 * side, 200)) for side in range(20)),
    ]
    if FAMILIES[family].slices_stand_alone:  # elsewhere transformers leaves the formula once time leaves the frame
        mixes += [
            (video(clip(77, rate=Fraction(24000, 1001))), "and", image(png), video(clip(5), fps=30.0), "?"),
            (video(clip(200), fps=12.0), video(clip(300, rate=10))),
        ]
    for parts in mixes:
        plan = planned(tiny, *parts).plan
        assert plan.positions.tolist() == rope_index(family, family_checkpoint, plan)


def test_a_videos_runs_are_its_slices_where_those_stand_alone_and_else_one(family: str, tiny: Planner) -> None:
    one, other = planned(tiny, video(clip(60)), image(picture(90, 60))).plan.media
    alone = FAMILIES[family].slices_stand_alone
    expected = [one.grid.slice_tokens] * one.grid.t if alone else [one.grid.tokens]
    assert [run.length for run in one.runs] == expected
    assert [run.length for run in other.runs] == [other.grid.tokens]


def test_text_alone_has_a_plan(tiny: Planner) -> None:
    plan = planned(tiny, "hello").plan
    assert plan.media == ()
    assert plan.positions.tolist() == [list(range(plan.tokens))] * 3
