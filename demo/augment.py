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
from demo.drawing import BRIGHT
from demo.scenes import Motion, Scene, Thing, Wall

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
    camera = scene.camera
    x, y, motion = _path(camera.x, camera.y, camera.motion, change, 0.0)
    scene = replace(
        scene,
        things=tuple(_changed(thing, change) for thing in scene.things),
        camera=replace(camera, x=x, y=y, motion=motion),
        wall=_changed_wall(scene.wall, change) if scene.wall else None,
    )
    if change.backwards:
        scene = replace(
            scene,
            cut_s=None if scene.cut_s is None else LAST_FRAME_S - scene.cut_s,
            brightness=tuple((LAST_FRAME_S - time_s, factor) for time_s, factor in reversed(scene.brightness)),
        )
    return scene, clip


def _path(
    x: float, y: float, motion: Motion | None, change: Change, mirror: float
) -> tuple[float, float, Motion | None]:
    """Where it begins and how it moves after `change`, mirrored at `mirror` on each axis."""
    if change.backwards and motion:
        dx, dy = motion.at(LAST_FRAME_S)
        x, y = x + dx, y + dy
    direction = motion.direction if motion else "left"
    if change.transpose:
        x, y, direction = y, x, TRANSPOSED[direction]
    if change.mirror_x:
        x = 2 * mirror - x
        direction = OPPOSITE[direction] if direction in ("left", "right") else direction
    if change.mirror_y:
        y = 2 * mirror - y
        direction = OPPOSITE[direction] if direction in ("up", "down") else direction
    if motion is None:
        return x, y, None
    start_s, stop_s = motion.start_s, motion.stop_s
    if change.backwards:
        direction = OPPOSITE[direction]
        start_s, stop_s = LAST_FRAME_S - stop_s, LAST_FRAME_S - start_s
    return x, y, Motion(direction, start_s, stop_s, motion.distance)


def _changed(thing: Thing, change: Change) -> Thing:
    x, y, motion = _path(thing.x, thing.y, thing.motion, change, 0.5)
    bright = tuple(BRIGHT[thing.colour][channel] for channel in change.channels)
    colour = next(name for name, channels in BRIGHT.items() if channels == bright)
    thing = replace(thing, colour=colour, x=x, y=y, motion=motion)
    if change.backwards:
        thing = replace(thing, from_s=LAST_FRAME_S - thing.until_s, until_s=LAST_FRAME_S - thing.from_s)
    return thing


def _changed_wall(wall: Wall, change: Change) -> Wall:
    upright = wall.upright != change.transpose
    mirrored = change.mirror_x if upright else change.mirror_y
    return Wall(upright, 1 - wall.centre if mirrored else wall.centre, wall.half)
