"""Sound tracks of high and low tones for the demo's scenes, and the questions that only picture and sound answer.

    motions    |    ────      ────    |
    tones      | high     | low       |     no tone changes while something moves

It knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from demo.questions import Question, in_order, names
from demo.scenes import DURATION_S, Scene, Thing

Samples: TypeAlias = NDArray[np.float32]

RATE = 16_000
PITCHES_HZ = {"high": (800.0, 1800.0), "low": (150.0, 330.0)}
OTHER = {"high": "low", "low": "high"}
# Of a tone, and of the time between its change and a motion.
SHORTEST_S, MARGIN_S = 1.75, 0.25
# Chances of no change of the tone, of one and of two.
CHANGES = (0.15, 0.55, 0.3)
_RAMP_S = 0.02


@dataclass(frozen=True, slots=True)
class Tone:
    """A tone until a time. name: "high" or "low"."""

    name: str
    hz: float
    until_s: float


@dataclass(frozen=True, slots=True)
class Track:
    """Tones from 0 s on, one after the other. loudness, noise: amplitudes. seed: of the noise."""

    tones: tuple[Tone, ...]
    loudness: float
    noise: float
    seed: int

    def tone_at(self, time_s: float) -> str:
        return next((tone.name for tone in self.tones if time_s < tone.until_s), self.tones[-1].name)


def random_track(movers: Sequence[Thing], rng: Random, lasts_s: float = DURATION_S) -> Track:
    """Of which no tone changes while one of these objects moves."""
    name, tones = rng.choice(("high", "low")), list[Tone]()
    for until_s in (*_changes(movers, rng, lasts_s), lasts_s):
        tones.append(Tone(name, rng.uniform(*PITCHES_HZ[name]), until_s))
        name = OTHER[name]
    return Track(tuple(tones), rng.uniform(0.05, 0.6), rng.choice((0.0, 0.0003, 0.003)), rng.randrange(2**31))


def _changes(movers: Sequence[Thing], rng: Random, lasts_s: float) -> list[float]:
    """When the tone changes: of several motions mostly also between two of them."""
    spans = sorted((each.motion.start_s, each.motion.stop_s) for each in movers if each.motion)
    free = [
        time_s
        for time_s in np.arange(SHORTEST_S, lasts_s - SHORTEST_S, 0.05).tolist()
        if not any(start_s - MARGIN_S < time_s < stop_s + MARGIN_S for start_s, stop_s in spans)
    ]
    between = [time_s for time_s in free if spans and spans[0][1] < time_s < spans[-1][0]]
    (wanted,) = rng.choices(range(len(CHANGES)), CHANGES)
    found: list[float] = []
    for _ in range(wanted):
        apart = [each for each in (free if found or not between else between) if _apart(each, found)]
        if apart:
            found.append(rng.choice(apart))
    return sorted(found)


def _apart(time_s: float, others: Sequence[float]) -> bool:
    return all(abs(time_s - other) >= SHORTEST_S for other in others)


def samples_of(track: Track) -> Samples:
    """float32 [N], at `RATE`, within ±1."""
    ends = [round(tone.until_s * RATE) for tone in track.tones]
    made = np.random.default_rng(track.seed).normal(0, track.noise, ends[-1])
    ramp = round(_RAMP_S * RATE)
    for tone, begin, end in zip(track.tones, [0, *ends], ends, strict=False):
        at = np.arange(end - begin)
        envelope = np.minimum(1, np.minimum(at, at[::-1]) / ramp)
        made[begin:end] += track.loudness * envelope * np.sin(2 * np.pi * tone.hz / RATE * at)
    return made.clip(-1, 1).astype(np.float32)


def tone_questions(track: Track) -> list[Question]:
    """Questions that the track answers without the pictures."""
    first, last = track.tones[0].name, track.tones[-1].name
    if len(track.tones) == 1:
        return [Question("tone", "Is the tone high or low?", first)]
    return [
        Question("tone", "Is the tone high or low at the beginning?", first),
        Question("tone", "Is the tone high or low at the end?", last),
    ]


def heard_questions(scene: Scene, track: Track) -> list[Question]:
    """Questions that need both the pictures and the track."""
    asked = []
    for tone in PITCHES_HZ:
        movers = [each for each in scene.movers if _tone_of(each, track) == tone]
        asked.append(Question("moves_while", f"What moves while the tone is {tone}?", names("the", in_order(movers))))
        asked += [
            Question("does_move_while", f"Does the {each.name} move while the tone is {tone}?", answer)
            for each in scene.things
            for answer in ("yes" if each in movers else "no",)
        ]
    asked += [
        Question("tone_while", f"Is the tone high or low while the {each.name} moves?", _tone_of(each, track))
        for each in scene.movers
    ]
    return asked


def _tone_of(mover: Thing, track: Track) -> str:
    assert mover.motion
    return track.tone_at((mover.motion.start_s + mover.motion.stop_s) / 2)
