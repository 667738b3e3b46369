"""Draws scenes as frames and encodes them as H.264 clips."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeAlias

import av
import numpy as np
from numpy.typing import NDArray

from demo.scenes import BACKGROUNDS, Scene, Thing
from demo.wordings import SHAPES

Pixels: TypeAlias = NDArray[np.uint8]
FloatArray: TypeAlias = NDArray[np.float32]
# Which of the channels red, green and blue are bright in each colour.
BRIGHT = {
    "red": (1, 0, 0),
    "green": (0, 1, 0),
    "blue": (0, 0, 1),
    "yellow": (1, 1, 0),
    "cyan": (0, 1, 1),
    "magenta": (1, 0, 1),
}


def render(scene: Scene) -> Iterator[Pixels]:
    """The frames of the scene, in order: uint8 [side, side, 3]."""
    rng = np.random.default_rng(scene.seed)
    backgrounds = [_Background.random(scene.background, rng)]
    paints = [_paint(thing.colour, rng) for thing in scene.things]
    noises = None
    if scene.noise:
        shape = (4, scene.side_px, scene.side_px, 3)
        noises = rng.normal(0, scene.noise, shape).astype(np.float32)
    if scene.cut_s is not None:
        backgrounds.append(_Background.random(scene.background, rng))
    wall_level = rng.uniform(90, 150) if scene.wall else 0.0
    shaken = np.random.default_rng(scene.seed + 1)
    x, y = _axes(scene.side_px)
    drawn: dict[tuple[int, float, float], FloatArray] = {}
    for index in range(scene.duration_s * scene.fps):
        time_s = index / scene.fps
        shake = shaken.uniform(-scene.camera.shake, scene.camera.shake, 2)
        left, top = (float(share) for share in np.add(scene.camera.corner_at(time_s), shake))
        shot = int(scene.cut_s is not None and time_s >= scene.cut_s)
        place = (shot, left - scene.drift[0] * time_s, top - scene.drift[1] * time_s)
        if place not in drawn:
            drawn = {place: backgrounds[shot].drawn(x + np.float32(place[1]), y + np.float32(place[2]))}
        frame = drawn[place]
        for thing, paint in zip(scene.things, paints, strict=True):
            if thing.from_s <= time_s < thing.until_s:
                centre_x, centre_y = thing.centre_at(time_s)
                cover = _cover(thing, scene.side_px, (centre_x - left, centre_y - top))[..., None]
                frame = frame * (1 - cover) + paint * cover
        if scene.wall is not None:
            along = x + left if scene.wall.upright else y + top
            outside = np.abs(along - scene.wall.centre) - scene.wall.half
            cover = np.clip(0.5 - outside * scene.side_px, 0, 1)[..., None]
            frame = frame * (1 - cover) + np.float32(wall_level) * cover
        if scene.brightness:
            times, factors = zip(*scene.brightness, strict=True)
            frame = frame * np.float32(np.interp(time_s, times, factors))
        if noises is not None:
            frame = frame + np.roll(noises[index % 4], int(rng.integers(scene.side_px)), axis=0)
        yield np.clip(frame + 0.5, 0, 255).astype(np.uint8)


def encode(scene: Scene, keyframe_every_s: float | None = None) -> bytes:
    """The scene as an H.264 mp4 file. keyframe_every_s: and nowhere else; None: where x264 puts keyframes."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=Fraction(scene.fps))
        stream.width = stream.height = scene.side_px
        stream.pix_fmt = "yuv420p"
        stream.options = {"preset": "veryfast", "crf": str(scene.crf)}
        if keyframe_every_s is not None:
            frames = str(round(keyframe_every_s * scene.fps))
            stream.options |= {"g": frames, "keyint_min": frames, "x264-params": "scenecut=0"}
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


@dataclass(frozen=True, slots=True, eq=False)
class _Background:
    """A pattern of two muted colours. numbers: the pattern's own."""

    pattern: str
    colours: tuple[FloatArray, FloatArray]
    angle: float
    numbers: Any

    @classmethod
    def random(cls, pattern: str, rng: np.random.Generator) -> _Background:
        level = rng.uniform(40, 200)
        one, other = (level + rng.uniform(-18, 18, 3).astype(np.float32) for _ in range(2))
        other = other + rng.choice((-1, 1)) * rng.uniform(8, 25)
        angle = rng.uniform(0, 2 * math.pi)
        numbers: Any = None
        match pattern:
            case "stripes":
                numbers = rng.uniform(12, 40)
            case "checks":
                numbers = rng.uniform(3, 8)
            case "blobs":
                numbers = rng.uniform(-14, 14, (4, 3))
        return cls(pattern, (one, other), angle, numbers)

    def drawn(self, x: FloatArray, y: FloatArray) -> FloatArray:
        """At coordinates x [1, side] and y [side, 1]: float32 [side, side, 3]."""
        one, other = self.colours
        weight = np.asarray(self._share(x, y), np.float32)[..., None]
        return np.asarray(one * (1 - weight) + other * weight, np.float32)

    def _share(self, x: FloatArray, y: FloatArray) -> Any:
        """The share of the second colour: [side, side]."""
        cos, sin = math.cos(self.angle), math.sin(self.angle)
        match self.pattern:
            case "plain":
                return 0 * (x + y)
            case "gradient":
                low, high = min(cos, 0) + min(sin, 0), max(cos, 0) + max(sin, 0)
                return (x * cos + y * sin - low) / (high - low)
            case "stripes":
                return 0.5 + 0.5 * np.sign(np.sin((x * cos + y * sin) * self.numbers))
            case "checks":
                return (np.floor(x * self.numbers) + np.floor(y * self.numbers)) % 2
            case "blobs":
                return 0.5 + sum(np.sin(x * a + y * b + c) for a, b, c in self.numbers) / 8
            case unknown:
                raise ValueError(f"background must be one of {BACKGROUNDS}, got {unknown!r}")


def _cover(thing: Thing, side_px: int, centre: tuple[float, float]) -> FloatArray:
    """The fraction of each pixel that the object covers, from its signed distance: float32 [side, side]."""
    x, y = _axes(side_px)
    dx, dy = x - centre[0], y - centre[1]
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
