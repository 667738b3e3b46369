"""The lessons of moments are answers that the product's grammar allows, and tell when things move."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from random import Random

import numpy as np
import pytest
import torch
from llguidance import LLMatcher, LLTokenizer

from demo.augment import Change, changed
from demo.clips import FRAMES, SIDE_PX, scene_of
from demo.lessons import moving_slices
from demo.moves import Judged, Move, answer_of, judged, moves_of, told_by
from demo.retiming import retimed
from demo.scenes import Motion, Scene, Thing
from gridsieve.common.checkpoint import DEMO_MODEL
from gridsieve.common.contract.plan import FrameShape, Grid, MediaPlan, Modality, PromptPlan, Run
from gridsieve.services.generation.sampling.moments import MomentsFormat, MomentsReader, Notation, moments_rules

CLOCK = Notation(clock=True)  # as the demo's family
SCENE = Scene(
    things=(
        Thing("blue", "square", 0.8, 0.2, 0.1, motion=Motion("down", 9.0, 11.9, 0.4)),
        Thing("red", "circle", 0.7, 0.7, 0.1, motion=Motion("left", 2.0, 4.6, 0.4)),
        Thing("cyan", "cross", 0.2, 0.2, 0.1),
    ),
    background="plain",
    side_px=112,
    fps=4,
    noise=0.0,
    seed=0,
)


def plan() -> PromptPlan:
    """The demo's clip as preprocessing plans it: 32 frames at 2 a second, two of them a slice."""
    times = tuple(frame / 2 for frame in range(FRAMES))
    shape, runs = FrameShape(FRAMES, (SIDE_PX, SIDE_PX)), (Run(1, 256),)
    media = MediaPlan(Modality.VIDEO, Grid(16, 4, 4), runs, shape, Fraction(1), times, bytes(32))
    return PromptPlan(np.zeros(258, np.int32), np.zeros((3, 258), np.int32), (media,), 0, bytes(32))


def test_answers_of_lessons_keep_to_the_grammar_and_tell_the_nearest_times() -> None:
    tokenizer = LLTokenizer((DEMO_MODEL / "tokenizer.json").read_text())
    rules = "\n".join(("start: document", *moments_rules(plan(), MomentsFormat(), CLOCK), ""))
    began = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(rules))
    reader = MomentsReader(plan(), MomentsFormat(), CLOCK)
    rng, empty, counts = Random(0), torch.zeros(FRAMES, 3, 1, 1, dtype=torch.uint8), set[int]()
    for seed in range(150):
        scene, _ = changed(scene_of(seed), empty, Change.random(rng))
        answer, matcher = answer_of(scene), began.deep_copy()
        assert matcher.consume_tokens(tokenizer.tokenize_str(answer)), answer
        assert matcher.is_accepting(), answer
        moments = reader.read(answer, {0: np.arange(256, dtype=np.int32)})
        motions = sorted(
            (thing.motion.start_s, thing.motion.stop_s, f"a {thing.name} moves {thing.motion.direction}")
            for thing in scene.things
            if thing.motion
        )
        for moment, (start_s, stop_s, description) in zip(moments, motions, strict=True):
            assert moment.description == description
            # Half a second is half the way to the next slice; a mirrored clip may move before its first slice's time.
            assert abs(moment.start_s - max(start_s, 0.25)) <= 0.5
            assert abs(moment.end_s - min(stop_s, 15.5)) <= 0.5
        counts.add(len(moments))
    assert counts == {0, 1, 2, 3}


def moment(start: str, end: str, description: str) -> str:
    return f'{{"start_time": "00:{start}", "end_time": "00:{end}", "description": "a {description}"}}'


# The red circle moves from 2 to 4.6 s, the blue square from 9 to 11.9 s.
RED, BLUE = moment("02.25", "04.25", "red circle moves left"), moment("09.25", "12.25", "blue square moves down")
# 1.25 s after the start, an overlap of 1 s in 2.6; and a time that the clip does not have.
LATE, BEYOND = moment("03.25", "04.25", "red circle moves left"), moment("09.25", "16.25", "blue square moves down")


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (f"[{RED}, {BLUE}]", Judged(True, True, True, True, True)),
        (f"Moments: [{BLUE}, {RED}].", Judged(True, True, True, True, True)),
        (f"[{RED}, {BLUE.replace('blue', 'green')}]", Judged(True, True, True, True, False)),
        (f"[{LATE}, {BLUE}]", Judged(True, True, False, False, False)),
        (f"[{RED}]", Judged(True, True, False, False, False)),
        (f"[{RED}, {BEYOND}]", Judged(True, False, False, False, False)),
        (f"[{RED}, {BLUE[:-1]}", Judged(False, False, False, False, False)),
        ("early", Judged(False, False, False, False, False)),
    ],
)
def test_an_answer_is_right_if_it_tells_every_move_within_a_slice(answer: str, right: Judged) -> None:
    assert judged(told_by(answer), SCENE) == right


def test_two_times_overlap_by_what_they_share_over_what_either_has() -> None:
    assert Move(2.25, 4.25, "").overlap(Move(3.0, 5.0, "")) == pytest.approx(1.25 / 2.75)
    assert Move(2.25, 4.25, "").overlap(Move(5.0, 6.0, "")) == 0


def test_a_shorter_clip_has_the_moves_within_it() -> None:
    assert [move.description for move in moves_of(replace(SCENE, duration_s=8))] == ["a red circle moves left"]


def test_at_other_times_the_slices_that_show_a_move_show_the_same() -> None:
    rng, shifted = Random(0), 0
    for seed in range(150):
        scene = scene_of(seed)
        other, shown = retimed(scene, rng)
        assert len(shown) == FRAMES // 2
        assert shown == sorted(shown)
        assert [shown[index] for index in moving_slices(other)] == moving_slices(scene)
        assert [move.description for move in moves_of(other)] == [move.description for move in moves_of(scene)]
        shifted += other != scene
    assert shifted > 50
