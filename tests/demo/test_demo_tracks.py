"""Tone tracks of scenes, and what is asked about them."""

from __future__ import annotations

from random import Random

import numpy as np

from demo.scenes import Motion, Thing
from demo.tracks import RATE, Tone, Track, heard_questions, random_track, samples_of
from tests.demo.scenes import scene

SCENE = scene(
    Thing("blue", "square", 0.8, 0.2, 0.1, motion=Motion("down", 9.0, 11.0, 0.4)),
    Thing("red", "circle", 0.7, 0.7, 0.1, motion=Motion("left", 2.0, 4.0, 0.4)),
)
TRACK = Track((Tone("high", 1000.0, 6.0), Tone("low", 200.0, 16.0)), loudness=0.5, noise=0.0, seed=0)


def test_no_tone_changes_while_something_moves() -> None:
    rng = Random(0)
    ends = [tone.until_s for _ in range(200) for tone in random_track(SCENE.movers, rng).tones[:-1]]
    assert len(ends) > 100
    assert not any(start_s <= each <= stop_s for each in ends for start_s, stop_s in ((2, 4), (9, 11)))


def test_a_tone_has_its_frequency() -> None:
    samples = samples_of(TRACK)
    assert samples.shape == (16 * RATE,)
    for first, hz in ((0, 1000), (8, 200)):
        assert np.abs(np.fft.rfft(samples[first * RATE : (first + 1) * RATE])).argmax() == hz


def test_answers_follow_from_motions_and_tones() -> None:
    told = {each.text: each.answer for each in heard_questions(SCENE, TRACK)}
    assert told["What moves while the tone is high?"] == "the red circle"
    assert told["What moves while the tone is low?"] == "the blue square"
    assert told["Does the blue square move while the tone is high?"] == "no"
    assert told["Is the tone high or low while the blue square moves?"] == "low"
