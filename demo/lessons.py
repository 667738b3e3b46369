"""The data of training steps: augmented scenes, questions about them, and a label for each token.

The dense labels follow from the geometry of the scenes. They train the vision tower, through a head that is discarded
afterwards, to represent what the questions ask about.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from demo.augment import Change, changed
from demo.checkpoint import SAMPLE_FPS
from demo.clips import FRAMES, SIDE_PX
from demo.drawing import Pixels
from demo.model import UNSUPERVISED, Prompt, PromptWriter
from demo.questions import picture_questions, questions_about
from demo.scenes import Scene, Thing
from demo.wordings import COLOURS, DIRECTIONS, SHAPES, SYSTEM_PROMPT

ROWS = COLUMNS = SIDE_PX // 28
# Classes of each token: none or a colour; none or a shape; none, still or a direction; none or the object's place.
DENSE_CLASSES = (1 + len(COLOURS), 1 + len(SHAPES), 2 + len(DIRECTIONS), 1 + ROWS * COLUMNS)
SYSTEM_SHARE = 0.15
# The brightness below which objects are not to be told.
DARK = 0.2
# Questions that need what an object looks like and what it does at once.
ABOUT_ONE = ("does_move", "direction", "when", "where")
# Kinds of scenes of which every frame shows all objects.
PICTURED = ("still", "pan", "shake", "backdrop", "small", "several", "grain")


class Lessons:
    """Draws clips, augments them and draws questions about them. Deterministic in `seed`."""

    def __init__(self, scenes: Sequence[Scene], clips: Pixels, writer: PromptWriter, seed: int) -> None:
        self._scenes = scenes
        self._clips = clips
        self._writer = writer
        self._rng = Random(seed)
        self._pictured = [index for index, scene in enumerate(scenes) if scene.kind in PICTURED]
        self._of_several = [index for index, scene in enumerate(scenes) if len(scene.movers) > 1]

    def draw(self, count: int, *, pictures: bool = False, of_several: int = 0) -> tuple[list[Scene], Tensor]:
        """`count` augmented scenes and their clips, uint8 [count, FRAMES, 3, side, side].

        pictures: only of those whose every frame shows all objects. of_several: how many at least have several movers.
        """
        chosen = self._rng.sample(self._of_several, of_several)
        chosen += self._rng.sample(self._pictured if pictures else range(len(self._scenes)), count - of_several)
        pairs = [
            changed(self._scenes[index], torch.from_numpy(np.array(self._clips[index])), Change.random(self._rng))
            for index in chosen
        ]
        return [scene for scene, _ in pairs], torch.stack([clip for _, clip in pairs])

    def ask(self, scene: Scene, questions: int, picture: bool = False) -> Prompt:
        """Some of the questions about a scene; of several movers first those about one of them."""
        every = picture_questions(scene, self._rng) if picture else questions_about(scene, self._rng)
        self._rng.shuffle(every)
        if len(scene.movers) > 1:
            every.sort(key=lambda question: question.kind not in ABOUT_ONE)
        return self._writer.asked(every[:questions], SYSTEM_PROMPT if self._rng.random() < SYSTEM_SHARE else None)


def dense_labels(scene: Scene, slices: Sequence[int]) -> Tensor:
    """Colour, shape, motion and place of the object on each token: int64 [len(slices) · rows · columns, 4].

    UNSUPERVISED where an object is partly there, in the dark or at a wall. Motion is that before the background.
    """
    labels = np.zeros((len(slices), ROWS, COLUMNS, len(DENSE_CLASSES)), np.int64)
    most = np.zeros((len(slices), ROWS, COLUMNS))
    walled = _walled(scene)
    for number, index in enumerate(slices):
        times = [(2 * index + frame) / SAMPLE_FPS for frame in (0, 1)]
        for thing in scene.things:
            there = [thing.from_s <= time_s < thing.until_s for time_s in times]
            if not any(there):
                continue
            share = np.mean([_share(thing, scene.place_at(thing, time_s)) for time_s in times], axis=0)
            ends = [thing.centre_at(time_s) for time_s in times]
            told = (
                1 + COLOURS.index(thing.colour),
                1 + SHAPES.index(thing.shape),
                _motion(thing, ends),
                _cell(scene.place_at(thing, times[0])),
            )
            clear = (share >= 0.12) & (share > most[number])
            labels[number][clear] = told
            labels[number][(share > 0.02) & (share < 0.12) & (most[number] < 0.12)] = UNSUPERVISED
            if not all(there) or _dark(scene, times):
                labels[number][share > 0.02] = UNSUPERVISED
            labels[number][(share > 0.02) & walled] = UNSUPERVISED
            most[number] = np.maximum(most[number], share)
    return torch.from_numpy(labels.reshape(-1, len(DENSE_CLASSES)))


def still_runs(scene: Scene, rng: Random) -> list[int]:
    """For each slice, a slice with the same content: itself if anything moves in it, else one of its still run."""
    shown = list(range(FRAMES // 2))
    if scene.kind not in ("still", "small", "several", "wall"):
        return shown
    moving = set(moving_slices(scene))
    start = 0
    for index in range(FRAMES // 2 + 1):
        if index == FRAMES // 2 or index in moving:
            if index > start:
                shown[start:index] = [rng.randrange(start, index)] * (index - start)
            start = index + 1
    return shown


def moving_slices(scene: Scene) -> list[int]:
    """The slices in which an object moves."""
    return [
        index
        for index in range(FRAMES // 2)
        if any(
            thing.motion and thing.motion.start_s < index + 1 and thing.motion.stop_s > index for thing in scene.things
        )
    ]


def _walled(scene: Scene) -> NDArray[np.bool_]:
    """The tokens at the wall: [rows, columns]."""
    found = np.zeros((ROWS, COLUMNS), np.bool_)
    if scene.wall is None:
        return found
    low, high = scene.wall.centre - scene.wall.half, scene.wall.centre + scene.wall.half
    cells = COLUMNS if scene.wall.upright else ROWS
    at = [index for index in range(cells) if index / cells < high and (index + 1) / cells > low]
    found[:, at] = scene.wall.upright
    found[at, :] |= not scene.wall.upright
    return found


def _dark(scene: Scene, times: Sequence[float]) -> bool:
    if not scene.brightness:
        return False
    at, factors = zip(*scene.brightness, strict=True)
    return bool(np.interp(times, at, factors).min() < DARK)


def _share(thing: Thing, centre: tuple[float, float]) -> np.ndarray:
    """The fraction of an object's bounding box in each token: [rows, columns]."""
    parts = []
    for middle, cells in ((centre[1], ROWS), (centre[0], COLUMNS)):
        edges = np.arange(cells + 1) / cells
        low, high = middle - thing.half, middle + thing.half
        inside = np.minimum(edges[1:], high) - np.maximum(edges[:-1], low)
        parts.append(np.clip(inside, 0, None) / (2 * thing.half))
    return np.outer(parts[0], parts[1])


def _cell(centre: tuple[float, float]) -> int:
    column, row = (
        min(max(int(share * cells), 0), cells - 1) for share, cells in zip(centre, (COLUMNS, ROWS), strict=True)
    )
    return 1 + row * COLUMNS + column


def _motion(thing: Thing, ends: Sequence[tuple[float, float]]) -> int:
    moved = max(abs(ends[1][0] - ends[0][0]), abs(ends[1][1] - ends[0][1]))
    if moved < 0.004:
        return 1
    if moved < 0.025 or thing.motion is None:
        return UNSUPERVISED
    return 2 + DIRECTIONS.index(thing.motion.direction)
