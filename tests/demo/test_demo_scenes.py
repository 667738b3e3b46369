"""Scenes of the demo, their clips and questions, and how augmentation changes them."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from demo.augment import Change, changed
from demo.clips import FRAMES, SIDE_PX, sample
from demo.example import QUESTIONS, SCENE
from demo.lessons import dense_labels
from demo.questions import questions_about
from demo.scenes import Motion, Scene, Thing, encode, random_scene
from demo.wordings import COLOURS, WORDINGS

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
@given(st.integers(0, 10_000))
def test_objects_stay_inside_the_frame_and_apart(seed: int) -> None:
    scene = random_scene(seed)
    for time_s in range(17):
        centres = [thing.centre_at(time_s) for thing in scene.things]
        for thing, centre in zip(scene.things, centres, strict=True):
            assert all(thing.half - 1e-9 <= share <= 1 - thing.half + 1e-9 for share in centre)
        if len(centres) == 2:
            gap = max(abs(one - other) for one, other in zip(*centres, strict=True))
            assert gap > scene.things[0].half + scene.things[1].half


def test_a_clip_changes_only_while_its_object_moves() -> None:
    clip = sample(encode(one_mover())).astype(int)
    change = np.abs(clip[1:] - clip[:-1]).max(axis=(1, 2, 3))
    moving = change > 60
    assert not moving[:5].any()
    assert moving[7:9].all()
    assert not moving[11:].any()


def test_questions_have_the_answers_of_the_scene() -> None:
    scene = one_mover()
    assert answers_to(scene, "happens") == {"A red circle moves right and a blue square stands still."}
    assert answers_to(scene, "mover") == {"the red circle"}
    assert answers_to(scene, "count") == {"two"}
    told = {" ".join(answer.split()[-2:]) for answer in answers_to(scene, "direction")}
    assert told == {"moves right."}
    assert answers_to(scene, "mover_colour") == {"The moving object is red."}


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


def test_dense_labels_name_the_object_on_each_token() -> None:
    labels = dense_labels(one_mover(), [0, 3]).view(2, 4, 4, 3)
    red_circle_still = [1 + COLOURS.index("red"), 1, 1]
    assert labels[0, 0, 0].tolist() == red_circle_still
    assert labels[0, 3, 0].tolist() == [0, 0, 0]
    assert (labels[1, :2, :, 2] == 2 + 1).any(), "the circle moves right in slice 3"
