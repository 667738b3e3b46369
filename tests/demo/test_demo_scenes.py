"""Scenes of the demo, their clips and questions, and how augmentation changes them."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from demo import clips
from demo.augment import Change, changed
from demo.clips import FRAMES, SIDE_PX, sample
from demo.drawing import encode
from demo.example import QUESTIONS, SCENE
from demo.questions import questions_about
from demo.scenes import KINDS, Motion, Scene, Thing, random_scene
from demo.wordings import WORDINGS

NO_CHANGE = Change(False, False, False, False, (0, 1, 2))


def scene_of(*things: Thing) -> Scene:
    return Scene(things, background="plain", side_px=112, fps=4, noise=0.0, seed=0)


def one_mover() -> Scene:
    return scene_of(
        Thing("red", "circle", 0.2, 0.25, 0.15, motion=Motion("right", 3.0, 5.0, 0.4)),
        Thing("blue", "square", 0.7, 0.7, 0.15),
    )


def answers_to(scene: Scene, kind: str) -> set[str]:
    return {question.answer for question in questions_about(scene, Random(0)) if question.kind == kind}


@settings(max_examples=30)
@given(st.sampled_from(KINDS), st.integers(0, 10_000))
def test_objects_stay_inside_the_frame_and_apart(kind: str, seed: int) -> None:
    scene = random_scene(seed, kind)
    for time_s in range(16):
        placed = [(thing.half, scene.place_at(thing, time_s)) for thing in scene.things_at(time_s)]
        for half, centre in placed:
            assert all(half - 1e-9 <= share <= 1 - half + 1e-9 for share in centre)
        for (half, centre), (other, beside) in combinations(placed, 2):
            assert max(abs(one - two) for one, two in zip(centre, beside, strict=True)) > half + other


def test_no_clip_is_used_for_two_purposes() -> None:
    training = range(clips.TRAINING_SEEDS, clips.TRAINING_SEEDS + clips.TRAINING_CLIPS)
    validation = range(clips.VALIDATION_SEEDS, clips.VALIDATION_SEEDS + clips.VALIDATION_CLIPS)
    evaluation = range(clips.EVALUATION_SEEDS, clips.EVALUATION_SEEDS + clips.EVALUATION_CLIPS)
    assert training.stop <= validation.start
    assert validation.stop <= evaluation.start
    assert {clips.scene_of(seed).kind for seed in evaluation} == set(KINDS)


def test_movers_are_asked_about_by_name_and_what_stands_by_its_place() -> None:
    scene = scene_of(
        Thing("cyan", "cross", 0.2, 0.25, 0.1, motion=Motion("right", 3.0, 5.0, 0.4)),
        Thing("green", "circle", 0.2, 0.75, 0.1, motion=Motion("up", 9.0, 11.0, 0.2)),
        Thing("magenta", "circle", 0.8, 0.8, 0.1),
    )
    assert answers_to(scene, "mover") == {"the green circle and the cyan cross"}
    assert answers_to(scene, "first") == {"the cyan cross"}
    assert answers_to(scene, "count_moving") == {"two"}
    assert answers_to(scene, "stands") == {"the magenta circle"}
    assert {answer.split()[-1] for answer in answers_to(scene, "when")} == {"early.", "late."}
    assert {answer.split()[-1] for answer in answers_to(scene, "direction")} == {"right.", "up."}
    assert {" ".join(answer.split()[-4:]) for answer in answers_to(scene, "where")} == {"at the bottom right."}
    assert not answers_to(scene, "happens")


def test_shots_are_asked_about_by_their_time() -> None:
    one, other = (
        Thing("red", "circle", 0.3, 0.3, 0.15, until_s=6.2),
        Thing("blue", "square", 0.7, 0.3, 0.15, from_s=6.2),
    )
    scene = replace(scene_of(one, other), cut_s=6.2)
    assert answers_to(scene, "beginning") == {"a red circle"}
    assert answers_to(scene, "end") == {"a blue square"}
    assert answers_to(scene, "cut") == {"yes"}
    backwards, _ = changed(scene, torch.from_numpy(sample(encode(scene))), replace(NO_CHANGE, backwards=True))
    assert answers_to(backwards, "beginning") == {"a blue square"}
    assert {thing.name for thing in backwards.things_at(9.0)} == {"blue square"}
    assert {thing.name for thing in backwards.things_at(9.5)} == {"red circle"}


def test_the_answers_of_the_example_are_correct() -> None:
    for question in QUESTIONS:
        assert answers_to(SCENE, question.kind) == {question.answer}
        assert question.text in WORDINGS[question.kind]


@pytest.mark.parametrize(
    ("change", "direction", "when", "colour"),
    [
        (replace(NO_CHANGE, mirror_x=True), "left", "early", "red"),
        (replace(NO_CHANGE, transpose=True), "down", "early", "red"),
        (replace(NO_CHANGE, backwards=True), "left", "late", "red"),
        (replace(NO_CHANGE, channels=(1, 0, 2)), "right", "early", "green"),
    ],
)
def test_an_augmented_clip_shows_its_augmented_scene(change: Change, direction: str, when: str, colour: str) -> None:
    original = one_mover()
    scene, clip = changed(original, torch.from_numpy(sample(encode(original))), change)
    mover = scene.movers[0]
    assert (mover.motion and mover.motion.direction, mover.colour) == (direction, colour)
    assert [answer.endswith(f"moves {when}.") for answer in answers_to(scene, "when")] == [True]
    for index in (0, 12, FRAMES - 1):
        x, y = (int(share * SIDE_PX) for share in mover.centre_at(index / 2))
        red, green, blue = clip[index, :, y, x].tolist()
        assert {"red": red, "green": green, "blue": blue}[colour] > 150
        assert sorted((red, green, blue))[1] < 90
