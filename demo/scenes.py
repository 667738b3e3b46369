"""Random scenes of coloured shapes: what stands and moves where and when, before which camera.

A scene is data: places and motions in fractions of the frame's side and in seconds. `demo.drawing` makes clips of it.
Each kind of scene is hard for pruning in a way of its own:

    still       one or two objects before a still background; a motion is short, so most tokens repeat
    pan         the camera moves over objects and background
    shake       the camera trembles
    backdrop    the background itself moves
    cut         another shot with other objects follows the first
    wall        an object passes behind a wall
    small       a small object crosses the frame quickly
    several     three objects, of which two or three move
    fade        the picture comes out of the dark, goes into it, or both
    grain       film grain
    compressed  strong compression: blocks come and go

It knows nothing of pixels, questions or models.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from demo.wordings import COLOURS, DIRECTIONS, SHAPES

DURATION_S = 16
STEPS = {"left": (-1.0, 0.0), "right": (1.0, 0.0), "up": (0.0, -1.0), "down": (0.0, 1.0)}
BACKGROUNDS = ("plain", "gradient", "stripes", "checks", "blobs")
# On which a camera's motion shows.
TEXTURES = ("stripes", "checks", "blobs")
KINDS = ("still", "pan", "shake", "backdrop", "cut", "wall", "small", "several", "fade", "grain", "compressed")
# The frame of an object is never nearer to another's than this.
GAP = 0.03


@dataclass(frozen=True, slots=True)
class Motion:
    """A straight move at constant speed between two times; `distance` is a fraction of the frame's side."""

    direction: str
    start_s: float
    stop_s: float
    distance: float

    def at(self, time_s: float) -> tuple[float, float]:
        """How far it has moved."""
        elapsed = (time_s - self.start_s) / (self.stop_s - self.start_s)
        gone = min(max(elapsed, 0.0), 1.0) * self.distance
        dx, dy = STEPS[self.direction]
        return gone * dx, gone * dy


@dataclass(frozen=True, slots=True)
class Thing:
    """One object: its initial centre and half its side, in fractions of the frame's side; `turn` in quarter turns.

    It is there from `from_s` on, until `until_s`.
    """

    colour: str
    shape: str
    x: float
    y: float
    half: float
    turn: int = 0
    motion: Motion | None = None
    from_s: float = -math.inf
    until_s: float = math.inf

    @property
    def name(self) -> str:
        return f"{self.colour} {self.shape}"

    def centre_at(self, time_s: float) -> tuple[float, float]:
        dx, dy = self.motion.at(time_s) if self.motion else (0.0, 0.0)
        return self.x + dx, self.y + dy


@dataclass(frozen=True, slots=True)
class Camera:
    """The point of the scene at the frame's top left corner, and its motion.

    shake: each frame is displaced by up to this much on both axes.
    """

    x: float = 0.0
    y: float = 0.0
    motion: Motion | None = None
    shake: float = 0.0

    def corner_at(self, time_s: float) -> tuple[float, float]:
        """Without shaking."""
        dx, dy = self.motion.at(time_s) if self.motion else (0.0, 0.0)
        return self.x + dx, self.y + dy


@dataclass(frozen=True, slots=True)
class Wall:
    """A grey bar across the whole frame, before all objects; `upright` from top to bottom, else from side to side."""

    upright: bool
    centre: float
    half: float


@dataclass(frozen=True, slots=True)
class Scene:
    """All that determines a clip's pixels.

    noise: levels of 255. seed: of noise, paint, background and shaking.
    drift: how far the background moves a second, on both axes. cut_s: when the second shot begins.
    brightness: times and factors, with straight lines between them. crf: of libx264, 0 to 51.
    """

    things: tuple[Thing, ...]
    background: str
    side_px: int
    fps: int
    noise: float
    seed: int
    duration_s: int = DURATION_S
    kind: str = "still"
    camera: Camera = Camera()
    wall: Wall | None = None
    drift: tuple[float, float] = (0.0, 0.0)
    cut_s: float | None = None
    brightness: tuple[tuple[float, float], ...] = ()
    crf: int = 20

    @property
    def movers(self) -> tuple[Thing, ...]:
        return tuple(thing for thing in self.things if thing.motion is not None)

    def place_at(self, thing: Thing, time_s: float) -> tuple[float, float]:
        """The centre of an object in the frame, without shaking."""
        x, y = thing.centre_at(time_s)
        left, top = self.camera.corner_at(time_s)
        return x - left, y - top

    def things_at(self, time_s: float) -> tuple[Thing, ...]:
        return tuple(thing for thing in self.things if thing.from_s <= time_s < thing.until_s)


def kind_of(seed: int) -> str:
    """The kind of scene that a seed of training or evaluation stands for: `still` and the hardest more often."""
    kinds = (*KINDS, "still", "still", "cut", "several")
    return kinds[seed % len(kinds)]


def random_scene(seed: int, kind: str = "still") -> Scene:
    """A scene of a kind. In each, objects have different colours and move once or not at all."""
    rng = Random(seed)
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    if kind == "cut":
        things, cut_s = _two_shots(rng)
    else:
        things, cut_s = _shot(rng, kind), None
    scene = Scene(
        things=things,
        background=rng.choice(BACKGROUNDS),
        side_px=rng.choice((112, 128, 160, 192, 224)),
        fps=rng.choice((4, 4, 6, 8)),
        noise=rng.choice((0.0, 1.0, 2.0)),
        seed=seed,
        kind=kind,
        cut_s=cut_s,
    )
    match kind:
        case "pan":
            return _panned(rng, scene)
        case "shake":
            shake = rng.uniform(0.012, 0.028)
            return replace(scene, background=rng.choice(TEXTURES), camera=Camera(shake=shake))
        case "backdrop":
            drift = (rng.choice((-1, 1)) * rng.uniform(0.02, 0.1), rng.choice((-1, 1)) * rng.uniform(0.02, 0.1))
            return replace(scene, background=rng.choice(TEXTURES), drift=drift)
        case "wall":
            return _walled(rng, scene)
        case "fade":
            return replace(scene, brightness=_fades(rng))
        case "grain":
            return replace(scene, noise=rng.uniform(10, 20) * scene.side_px / 112, crf=22)
        case "compressed":
            return replace(scene, crf=rng.randint(38, 46))
    return scene


def _shot(rng: Random, kind: str) -> tuple[Thing, ...]:
    if kind == "several":
        count, moving, sizes = 3, rng.choice((2, 2, 3)), (0.09, 0.12)
    else:
        count = rng.choice((1, 2, 2))
        moving = rng.choices(range(count + 1), weights=(0.2, 0.8) if count == 1 else (0.12, 0.58, 0.3))[0]
        sizes = (0.12, 0.17)
        if kind in ("small", "wall") and not moving:
            moving = 1
    things: tuple[Thing, ...] = ()
    while len(things) < count:
        # There may be no space left for the last object: start over.
        things = _place(rng, count, moving, sizes, fast=kind == "small") or ()
    return things


def _place(
    rng: Random,
    count: int,
    moving: int,
    sizes: tuple[float, float],
    *,
    fast: bool = False,
    starts: Sequence[float] | None = None,
) -> tuple[Thing, ...] | None:
    colours = rng.sample(COLOURS, count)
    if starts is None:
        starts = _starts(rng, moving)
    things: list[Thing] = []
    for index in range(count):
        for _ in range(20):
            small = fast and index == 0
            half = rng.uniform(*((0.06, 0.085) if small else sizes))
            motion = None
            if index < moving:
                motion = _fast_motion(rng, starts[index]) if small else _motion(rng, starts[index])
            thing = Thing(
                colours[index],
                rng.choice(SHAPES),
                rng.uniform(half, 1 - half),
                rng.uniform(half, 1 - half),
                half,
                rng.randrange(4),
                motion,
            )
            if _inside(thing) and all(_apart(thing, other) for other in things):
                things.append(thing)
                break
        else:
            return None
    rng.shuffle(things)
    return tuple(things)


def _starts(rng: Random, moving: int) -> list[float]:
    """Start times of the moving objects: clearly in one half of the clip, and clearly one after the other."""
    while True:
        starts = [rng.choice((rng.uniform(0.8, 4.5), rng.uniform(8.5, 12.0))) for _ in range(moving)]
        ordered = sorted(starts)
        apart = 3.5 if moving < 3 else 1.2
        if all(later - earlier > apart for earlier, later in itertools.pairwise(ordered)):
            return starts


def _motion(rng: Random, start_s: float) -> Motion:
    lasts_s = rng.uniform(1.5, 3.0)
    speed = rng.uniform(0.1, 0.2)
    return Motion(rng.choice(DIRECTIONS), start_s, start_s + lasts_s, lasts_s * speed)


def _fast_motion(rng: Random, start_s: float) -> Motion:
    lasts_s = rng.uniform(1.1, 1.8)
    return Motion(rng.choice(DIRECTIONS), start_s, start_s + lasts_s, rng.uniform(0.45, 0.75))


def _two_shots(rng: Random) -> tuple[tuple[Thing, ...], float]:
    """The objects of two shots, each of at most two, of different colours; and when the second begins."""
    cut_s = rng.choice((rng.uniform(5.1, 7.4), rng.uniform(7.9, 10.4)))
    colours = rng.sample(COLOURS, 4)
    things: list[Thing] = []
    for from_s, until_s in ((-math.inf, cut_s), (cut_s, math.inf)):
        count, moving = rng.choice((1, 2)), rng.choice((0, 1))
        starts = [rng.uniform(max(from_s, 0) + 0.6, min(until_s, DURATION_S) - 3.4)] * moving
        shot: tuple[Thing, ...] = ()
        while len(shot) < count:
            shot = _place(rng, count, moving, (0.12, 0.17), starts=starts) or ()
        things += [replace(thing, colour=colours.pop(), from_s=from_s, until_s=until_s) for thing in shot]
    return tuple(things), cut_s


def _panned(rng: Random, scene: Scene) -> Scene:
    """The scene with a camera that moves for at least half of the clip, and never loses an object."""
    while True:
        start_s = rng.uniform(0.0, 6.0)
        motion = Motion(rng.choice(DIRECTIONS), start_s, start_s + rng.uniform(8.0, 10.0), rng.uniform(0.15, 0.4))
        dx, dy = STEPS[motion.direction]
        # The objects were placed for a still camera in the middle of its way.
        camera = Camera(-dx * motion.distance / 2, -dy * motion.distance / 2, motion)
        panned = replace(scene, background=rng.choice(TEXTURES), camera=camera)
        if all(
            thing.half <= share <= 1 - thing.half
            for thing in panned.things
            for half_seconds in range(2 * DURATION_S + 1)
            for share in panned.place_at(thing, half_seconds / 2)
        ):
            return panned
        scene = replace(scene, things=_shot(rng, "pan"))


def _walled(rng: Random, scene: Scene) -> Scene:
    """One object passes behind a wall, from one side to the other; a second one, if any, stands beside it all."""
    while True:
        mover = scene.movers[0]
        assert mover.motion is not None
        upright = mover.motion.direction in ("left", "right")
        wall = Wall(upright, rng.uniform(0.4, 0.6), rng.uniform(0.08, 0.13))
        side = 1 if mover.motion.direction in ("right", "down") else -1
        out = wall.half + mover.half + 0.02
        before, after = wall.centre - side * out, wall.centre + side * out
        motion = replace(mover.motion, distance=abs(after - before) + rng.uniform(0, 0.08))
        motion = replace(motion, stop_s=motion.start_s + rng.uniform(2.4, 3.0))
        passing = replace(mover, motion=motion)
        passing = replace(passing, x=before) if upright else replace(passing, y=before)
        others = tuple(replace(thing, motion=None) for thing in scene.things if thing is not mover)
        visible = all(abs((thing.x if upright else thing.y) - wall.centre) > wall.half + thing.half for thing in others)
        if visible and _inside(passing) and all(_apart(passing, other) for other in others):
            return replace(scene, things=(passing, *others), wall=wall)
        scene = replace(scene, things=_shot(rng, "wall"))


def _fades(rng: Random) -> tuple[tuple[float, float], ...]:
    """Dark at one end or both, or in the middle; motions outside of the dark show it all."""
    dark = rng.uniform(0.0, 0.08)
    kind = rng.choice(("in", "out", "both", "dip"))
    lasts_s = rng.uniform(1.5, 3.0)
    points: list[tuple[float, float]] = []
    if kind in ("in", "both"):
        points += [(0.0, dark), (rng.uniform(0.5, 1.2), dark), (lasts_s, 1.0)]
    if kind in ("out", "both"):
        points += [(DURATION_S - lasts_s, 1.0), (DURATION_S - rng.uniform(0.9, 1.5), dark), (float(DURATION_S), dark)]
    if kind == "dip":
        middle_s = rng.uniform(7.4, 8.4)
        points += [(middle_s - lasts_s, 1.0), (middle_s, dark), (middle_s + lasts_s, 1.0)]
    return tuple(points)


def _ends(thing: Thing) -> tuple[tuple[float, float], tuple[float, float]]:
    return (thing.x, thing.y), thing.centre_at(DURATION_S)


def _inside(thing: Thing) -> bool:
    return all(thing.half <= share <= 1 - thing.half for centre in _ends(thing) for share in centre)


def _apart(one: Thing, other: Thing) -> bool:
    """Whether the areas that two objects cover over time are disjoint, with a gap on at least one axis."""
    for axis in (0, 1):
        (low, high), (other_low, other_high) = (sorted(end[axis] for end in _ends(thing)) for thing in (one, other))
        if max(low - other_high, other_low - high) > one.half + other.half + GAP:
            return True
    return False
