"""Augments clips: mirrors, transposes, reverses time and permutes colour channels.

The scene is changed with its clip, so that questions about the new scene have correct answers for the new clip. The
six colours of the demo are red, green, blue and their mixtures, which permutations of the channels map onto each other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

import torch
from torch import Tensor

from demo.checkpoint import SAMPLE_FPS
from demo.clips import FRAMES
from demo.scenes import BRIGHT, Motion, Scene, Thing

LAST_FRAME_S = (FRAMES - 1) / SAMPLE_FPS
OPPOSITE = {"left": "right", "right": "left", "up": "down", "down": "up"}
TRANSPOSED = {"left": "up", "up": "left", "right": "down", "down": "right"}


@dataclass(frozen=True, slots=True)
class Change:
    """The symmetries to apply, in this order: transpose, mirror, reverse time, permute channels."""

    transpose: bool
    mirror_x: bool
    mirror_y: bool
    backwards: bool
    channels: tuple[int, int, int]

    @classmethod
    def random(cls, rng: Random) -> Change:
        first, second, third = rng.sample(range(3), 3)
        transpose, mirror_x, mirror_y, backwards = (rng.random() < 0.5 for _ in range(4))
        return cls(transpose, mirror_x, mirror_y, backwards, (first, second, third))


def changed(scene: Scene, clip: Tensor, change: Change) -> tuple[Scene, Tensor]:
    """The scene and its clip after `change`. clip: uint8 [frames, 3, side, side]."""
    clip = clip[:, list(change.channels)]
    if change.transpose:
        clip = clip.transpose(-1, -2)
    axes = [axis for axis, flip in ((-1, change.mirror_x), (-2, change.mirror_y), (0, change.backwards)) if flip]
    clip = torch.flip(clip, axes) if axes else clip
    return replace(scene, things=tuple(_changed(thing, change) for thing in scene.things)), clip


def _changed(thing: Thing, change: Change) -> Thing:
    x, y = thing.centre_at(LAST_FRAME_S) if change.backwards else (thing.x, thing.y)
    direction = thing.motion.direction if thing.motion else "left"
    if change.transpose:
        x, y, direction = y, x, TRANSPOSED[direction]
    if change.mirror_x:
        x = 1 - x
        direction = OPPOSITE[direction] if direction in ("left", "right") else direction
    if change.mirror_y:
        y = 1 - y
        direction = OPPOSITE[direction] if direction in ("up", "down") else direction
    motion = thing.motion
    if motion is not None:
        start_s, stop_s = motion.start_s, motion.stop_s
        if change.backwards:
            direction = OPPOSITE[direction]
            start_s, stop_s = LAST_FRAME_S - stop_s, LAST_FRAME_S - start_s
        motion = Motion(direction, start_s, stop_s, motion.distance)
    bright = tuple(BRIGHT[thing.colour][channel] for channel in change.channels)
    colour = next(name for name, channels in BRIGHT.items() if channels == bright)
    return replace(thing, colour=colour, x=x, y=y, motion=motion)
