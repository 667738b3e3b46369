"""The embedded model that hears, through the services: another track of the same clip changes its answer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from demo.drawing import encode
from demo.scenes import Motion, Thing
from demo.tracks import Tone, Track, samples_of
from gridsieve.client.client import GridsieveClient
from gridsieve.client.prompt import Audio, Pruning, Video
from gridsieve.common.checkpoint import DEMO_TONES
from tests import media
from tests.demo.scenes import scene
from tests.integration.fleet import Stack, running

SCENE = scene(
    Thing("red", "circle", x=0.25, y=0.25, half=0.14, motion=Motion("down", 2.5, 5.0, 0.4)),
    Thing("blue", "square", x=0.75, y=0.6, half=0.15, motion=Motion("up", 10.0, 12.5, 0.35)),
    background="gradient",
    seed=3,
)
FALLING = Track((Tone("high", 1200.0, 7.5), Tone("low", 220.0, 16.0)), loudness=0.3, noise=0.0003, seed=1)
RISING = Track((Tone("low", 220.0, 7.5), Tone("high", 1200.0, 16.0)), loudness=0.3, noise=0.0003, seed=1)


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with running(DEMO_TONES) as found:
        yield found


async def test_another_track_changes_the_answer_also_of_a_pruned_clip(stack: Stack) -> None:
    clip = encode(SCENE)
    async with GridsieveClient(stack.address) as client:
        for pruning in (Pruning(0.0), Pruning(0.75, "evs")):
            for track, movers in (
                (FALLING, ("the red circle", "the blue square")),
                (RISING, ("the blue square", "the red circle")),
            ):
                heard = Video(data=media.with_sound(clip, samples_of(track)), audio=True, pruning=pruning)
                for tone, mover in zip(("high", "low"), movers, strict=True):
                    answer = await client.ask(heard, f"What moves while the tone is {tone}?")
                    assert answer.text == mover
                    seen, sound = answer.usage.media
                    assert (seen.num_kept, sound.num_kept) == (64 if pruning.rate else 256, 64)


async def test_a_track_is_heard_by_itself(stack: Stack) -> None:
    async with GridsieveClient(stack.address) as client:
        for track, first in ((FALLING, "high"), (RISING, "low")):
            sound = Audio(data=media.sound(samples_of(track)))
            assert (await client.ask(sound, "Is the tone high or low at the beginning?")).text == first
