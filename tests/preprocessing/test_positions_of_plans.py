"""Positions of whole plans: real clips, sampled at the rates that callers ask for, against the formula."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path

import pytest

from common.checkpoint import Checkpoint
from common.contract.plan import Modality
from services.preprocessing.planner import Conversation, MediaRequest, Planner
from services.preprocessing.prompt.tokens import Turn
from services.preprocessing.video.sampling import FrameSampling
from tests.families import FAMILIES
from tests.preprocessing.preprocessing_media import clip

TOKENS_PER_SECOND = 2  # of the tiny checkpoint
FILM = Fraction(24000, 1001)


@pytest.mark.parametrize(
    ("frames", "rate", "fps", "sampled"),
    [
        (120, FILM, 1.0, 4),  # 5.005 s
        (120, FILM, 2.0, 10),
        (120, FILM, 4.0, 20),
        (120, FILM, 23.976, 118),  # 5.005 · 23.976 = 119.99988, floored to whole pairs
        (240, Fraction(30), 2.0, 16),
        (1100, Fraction(1), 1.0, 768),  # 1100 s: the last slices stand beyond 2,048
    ],
)
def test_a_clip_stands_where_its_sampled_times_say(
    tiny_checkpoint: Path, frames: int, rate: Fraction, fps: float, sampled: int
) -> None:
    look = MediaRequest("video", Modality.VIDEO, clip(frames, rate=rate), FrameSampling(fps=fps))
    # 300 words before the clip put it beyond 256.
    turn = Turn("user", ("so " * 300, Modality.VIDEO, "what?"))
    plan = Planner(Checkpoint(tiny_checkpoint), None).plan(Conversation((turn,), (look,))).plan
    (item,) = plan.media
    (run,) = item.runs
    assert item.frames == sampled
    step = 2 * frames / (sampled * rate) * TOKENS_PER_SECOND
    start = run.offset
    assert start > 256
    expected = [
        [start + math.floor(i * step), start + j, start + k]
        for i in range(sampled // 2)
        for j in range(item.grid.h)
        for k in range(item.grid.w)
    ]
    assert plan.positions[:, run.offset : run.end].T.tolist() == expected
    after = max(map(max, expected)) + 1
    assert plan.positions[:, run.end :].tolist() == [list(range(after, after + plan.tokens - run.end))] * 3
    if frames == 1100:
        assert after > 2048


@pytest.mark.parametrize(
    ("frames", "rate", "fps", "sampled"),
    [
        (120, FILM, 1.0, 5),  # 5.005 s
        (120, FILM, 2.0, 10),
        (120, FILM, 23.976, 119),  # 5.005 · 23.976 = 119.99988
        (1100, Fraction(1), 1.0, 768),
    ],
)
def test_a_clip_whose_slices_stand_alone_stands_between_its_times(
    tmp_path: Path, frames: int, rate: Fraction, fps: float, sampled: int
) -> None:
    look = MediaRequest("video", Modality.VIDEO, clip(frames, rate=rate), FrameSampling(fps=fps))
    turn = Turn("user", ("so " * 300, Modality.VIDEO, "what?"))
    checkpoint = Checkpoint(FAMILIES["qwen3_vl"].write(tmp_path / "checkpoint", 1))
    plan = Planner(checkpoint, None).plan(Conversation((turn,), (look,))).plan
    (item,) = plan.media
    assert len(item.runs) == item.grid.t == (sampled + 1) // 2
    # Each slice before takes as many positions as its longer side, where it has that many times the shorter in tokens.
    saved = item.grid.slice_tokens - max(item.grid.h, item.grid.w)
    for index, run in enumerate(item.runs):
        start = run.offset - index * saved
        expected = [[start, start + j, start + k] for j in range(item.grid.h) for k in range(item.grid.w)]
        assert plan.positions[:, run.offset : run.end].T.tolist() == expected
    last = item.runs[-1].end
    after = last - item.grid.t * saved
    assert plan.positions[:, last:].tolist() == [list(range(after, after + plan.tokens - last))] * 3
