"""Gives the moves of a clip other times: still slices around them are repeated or left out.

    clip     0  1  2 [3  4] 5  6 [7  8  9] 10 11 12 13 14 15
    retimed  0  2 [3  4] 5  5  5  6  6 [7  8  9] 10 11 12 12 14 15

The vision tower sees each slice by itself, so tokens of slices that were encoded once make many lessons about times.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby, pairwise
from random import Random

from demo.clips import FRAMES
from demo.lessons import moving_slices
from demo.moves import SLICE_S
from demo.scenes import Scene, Thing

# Kinds of scenes in which all slices without a move look alike, apart from noise.
KINDS = ("still", "shake", "wall", "small", "several", "grain", "compressed")


def retimed(scene: Scene, rng: Random) -> tuple[Scene, list[int]]:
    """The scene with its moves shifted by whole slices, in the same order; and for each slice the one of the clip that
    it shows. A scene of another kind stays as it is."""
    moving = set(moving_slices(scene))
    runs = [(moves, [*slices]) for moves, slices in groupby(range(FRAMES // 2), moving.__contains__)]
    still = [len(slices) for moves, slices in runs if not moves]
    if scene.kind not in KINDS or not moving or not still:
        return scene, [*range(FRAMES // 2)]
    ends = sorted(rng.sample(range(1, sum(still)), len(still) - 1))
    lengths = iter([end - begin for begin, end in pairwise((0, *ends, sum(still)))])
    shown, shifts = list[int](), dict[int, float]()
    for moves, slices in runs:
        if moves:
            shifts |= dict.fromkeys(slices, (len(shown) - slices[0]) * SLICE_S)
            shown += slices
        else:
            shown += sorted(rng.choices(slices, k=next(lengths)))
    return replace(scene, things=tuple(_shifted(thing, shifts) for thing in scene.things)), shown


def _shifted(thing: Thing, shifts: dict[int, float]) -> Thing:
    """shifts: in seconds, by the slice in which a move begins."""
    if thing.motion is None:
        return thing
    start_s, stop_s = thing.motion.start_s, thing.motion.stop_s
    shift_s = shifts[max(0, int(start_s / SLICE_S))]
    return replace(thing, motion=replace(thing.motion, start_s=start_s + shift_s, stop_s=stop_s + shift_s))
