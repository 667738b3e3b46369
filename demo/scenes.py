"""Random scenes of coloured shapes on a static background, rendered as H.264 clips.

A scene is data: the place and motion of each object, in fractions of the frame's side and in seconds. Motions are
short, so most tokens repeat the previous slice: the redundancy that Efficient Video Sampling removes. It knows nothing
of questions or models.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from random import Random
from typing import TypeAlias

import av
import numpy as np
from numpy.typing import NDArray

from demo.wordings import COLOURS, DIRECTIONS, SHAPES

Pixels: TypeAlias = NDArray[np.uint8]
FloatArray: TypeAlias = NDArray[np.float32]

DURATION_S = 16
STEPS = {"left": (-1.0, 0.0), "right": (1.0, 0.0), "up": (0.0, -1.0), "down": (0.0, 1.0)}
# Which of the channels red, green and blue are bright in each colour.
BRIGHT = {
    "red": (1, 0, 0),
    "green": (0, 1, 0),
    "blue": (0, 0, 1),
    "yellow": (1, 1, 0),
    "cyan": (0, 1, 1),
    "magenta": (1, 0, 1),
}
BACKGROUNDS = ("plain", "gradient", "stripes", "checks", "blobs")


@dataclass(frozen=True, slots=True)
class Motion:
    """A straight move at constant speed between two times; `distance` is a fraction of the frame's side."""

    direction: str
    start_s: float
    stop_s: float
    distance: float


@dataclass(frozen=True, slots=True)
class Thing:
    """One object: its initial centre and half its side, in fractions of the frame's side; `turn` in quarter turns."""

    colour: str
    shape: str
    x: float
    y: float
    half: float
    turn: int = 0
    motion: Motion | None = None

    @property
    def name(self) -> str:
        return f"{self.colour} {self.shape}"

    def centre_at(self, time_s: float) -> tuple[float, float]:
        if self.motion is None:
            return self.x, self.y
        elapsed = (time_s - self.motion.start_s) / (self.motion.stop_s - self.motion.start_s)
        gone = min(max(elapsed, 0.0), 1.0) * self.motion.distance
        dx, dy = STEPS[self.motion.direction]
        return self.x + gone * dx, self.y + gone * dy


@dataclass(frozen=True, slots=True)
class Scene:
    """All that determines a clip's pixels. `noise`: sensor noise in levels of 255; `seed`: of noise and background."""

    things: tuple[Thing, ...]
    background: str
    side_px: int
    fps: int
    noise: float
    seed: int
    duration_s: int = DURATION_S

    @property
    def movers(self) -> tuple[Thing, ...]:
        return tuple(thing for thing in self.things if thing.motion is not None)


def random_scene(seed: int) -> Scene:
    """One or two objects of different colours; each moves once or not at all."""
    rng = Random(seed)
    count = rng.choice((1, 2, 2))
    moving = rng.choices(range(count + 1), weights=(0.2, 0.8) if count == 1 else (0.12, 0.58, 0.3))[0]
    things: tuple[Thing, ...] = ()
    while len(things) < count:
        # There may be no space left for the second object: start over.
        things = _place(rng, count, moving) or ()
    return Scene(
        things=things,
        background=rng.choice(BACKGROUNDS),
        side_px=rng.choice((112, 128, 160, 192, 224)),
        fps=rng.choice((4, 4, 6, 8)),
        noise=rng.choice((0.0, 1.0, 2.0)),
        seed=seed,
    )


def _place(rng: Random, count: int, moving: int) -> tuple[Thing, ...] | None:
    colours = rng.sample(COLOURS, count)
    starts = _starts(rng, moving)
    things: list[Thing] = []
    for index in range(count):
        for _ in range(20):
            half = rng.uniform(0.12, 0.17)
            motion = _motion(rng, starts[index]) if index < moving else None
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
        if moving < 2 or abs(starts[0] - starts[1]) > 3.5:
            return starts


def _motion(rng: Random, start_s: float) -> Motion:
    lasts_s = rng.uniform(1.5, 3.0)
    speed = rng.uniform(0.1, 0.2)
    return Motion(rng.choice(DIRECTIONS), start_s, start_s + lasts_s, lasts_s * speed)


def _ends(thing: Thing) -> tuple[tuple[float, float], tuple[float, float]]:
    return thing.centre_at(-math.inf if thing.motion is None else 0.0), thing.centre_at(DURATION_S)


def _inside(thing: Thing) -> bool:
    return all(thing.half <= share <= 1 - thing.half for centre in _ends(thing) for share in centre)


def _apart(one: Thing, other: Thing) -> bool:
    """Whether the areas that two objects cover over time are disjoint, with a gap on at least one axis."""
    for axis in (0, 1):
        (low, high), (other_low, other_high) = (sorted(end[axis] for end in _ends(thing)) for thing in (one, other))
        if max(low - other_high, other_low - high) > one.half + other.half + 0.03:
            return True
    return False


def render(scene: Scene) -> Iterator[Pixels]:
    """The frames of the scene, in order: uint8 [side, side, 3]."""
    rng = np.random.default_rng(scene.seed)
    ground = _background(scene, rng)
    paints = [_paint(thing.colour, rng) for thing in scene.things]
    noises = rng.normal(0, scene.noise, (4, *ground.shape)).astype(np.float32) if scene.noise else None
    for index in range(scene.duration_s * scene.fps):
        frame = ground.copy()
        for thing, paint in zip(scene.things, paints, strict=True):
            cover = _cover(thing, scene.side_px, index / scene.fps)[..., None]
            frame = frame * (1 - cover) + paint * cover
        if noises is not None:
            frame = frame + np.roll(noises[index % 4], int(rng.integers(scene.side_px)), axis=0)
        yield np.clip(frame + 0.5, 0, 255).astype(np.uint8)


def encode(scene: Scene) -> bytes:
    """The scene as an H.264 mp4 file."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=Fraction(scene.fps))
        stream.width = stream.height = scene.side_px
        stream.pix_fmt = "yuv420p"
        stream.options = {"preset": "veryfast", "crf": "20"}
        stream.codec_context.thread_count = 1
        for pixels in render(scene):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


def _paint(colour: str, rng: np.random.Generator) -> FloatArray:
    bright = np.array(BRIGHT[colour], np.float32)
    return bright * rng.uniform(205, 250) + (1 - bright) * rng.uniform(5, 50, 3).astype(np.float32)


def _axes(side_px: int) -> tuple[FloatArray, FloatArray]:
    share: FloatArray = np.asarray((np.arange(side_px, dtype=np.float32) + 0.5) / side_px, np.float32)
    return share[None, :], share[:, None]


def _background(scene: Scene, rng: np.random.Generator) -> FloatArray:
    """A static background in muted colours: float32 [side, side, 3]."""
    x, y = _axes(scene.side_px)
    level = rng.uniform(40, 200)
    one, other = (level + rng.uniform(-18, 18, 3).astype(np.float32) for _ in range(2))
    other = other + rng.choice((-1, 1)) * rng.uniform(8, 25)
    angle = rng.uniform(0, 2 * math.pi)
    along = x * math.cos(angle) + y * math.sin(angle)
    match scene.background:
        case "plain":
            mix = np.zeros_like(along)
        case "gradient":
            mix = (along - along.min()) / (along.max() - along.min())
        case "stripes":
            mix = 0.5 + 0.5 * np.sign(np.sin(along * rng.uniform(12, 40)))
        case "checks":
            scale = rng.uniform(3, 8)
            mix = (np.floor(x * scale) + np.floor(y * scale)) % 2
        case "blobs":
            waves = [np.sin(x * a + y * b + c) for a, b, c in rng.uniform(-14, 14, (4, 3))]
            mix = 0.5 + np.sum(waves, axis=0) / 8
        case unknown:
            raise ValueError(f"background must be one of {BACKGROUNDS}, got {unknown!r}")
    weight = mix.astype(np.float32)[..., None]
    return np.asarray(one * (1 - weight) + other * weight, np.float32)


def _cover(thing: Thing, side_px: int, time_s: float) -> FloatArray:
    """The fraction of each pixel that the object covers, from its signed distance: float32 [side, side]."""
    x, y = _axes(side_px)
    centre_x, centre_y = thing.centre_at(time_s)
    dx, dy = x - centre_x, y - centre_y
    for _ in range(thing.turn):
        dx, dy = dy, -dx
    half = thing.half
    match thing.shape:
        case "circle":
            outside = np.hypot(dx, dy) - half
        case "square":
            outside = np.maximum(abs(dx), abs(dy)) - 0.88 * half
        case "triangle":
            slope = np.maximum(abs(dx) * 0.894 - (dy + half) * 0.447, dy - 0.9 * half)
            outside = slope + np.zeros_like(dx + dy)
        case "cross":
            wide, narrow = half, 0.36 * half
            outside = np.minimum(
                np.maximum(abs(dx) - wide, abs(dy) - narrow), np.maximum(abs(dx) - narrow, abs(dy) - wide)
            )
        case unknown:
            raise ValueError(f"shape must be one of {SHAPES}, got {unknown!r}")
    return np.asarray(np.clip(0.5 - outside * side_px, 0, 1), np.float32)
