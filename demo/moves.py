"""The moves of a scene as moments: the answer of a lesson that teaches to tell them, and how right an answer is.

    move         ───────────            3.1 to 4.9 s
    slices   2     3     4     5        told at 2.25, 3.25, … s, as the prompt has them
    answer       3.25 ──── 5.25         each end at the time that is nearest

It knows the product's notation of times, and nothing of pixels or models.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from demo.checkpoint import SAMPLE_FPS
from demo.questions import Question
from demo.scenes import Scene
from gridsieve.services.generation.sampling.moments import ClipTimes, Notation

KIND = "moments"
ASKED = ("What happens, and when?", "What moves, and when?", "Which objects move, and when?")
NOTATION = Notation(clock=True)
SLICE_S = 2 / SAMPLE_FPS
LEAST_OVERLAP = 0.5


@dataclass(frozen=True, slots=True)
class Move:
    """What moves from `start_s` to `end_s`, in seconds of the clip. description: such as `a red circle moves left`."""

    start_s: float
    end_s: float
    description: str

    def is_near(self, true: Move) -> bool:
        """Whether both ends are at most a slice away from the true ones."""
        return max(abs(self.start_s - true.start_s), abs(self.end_s - true.end_s)) <= SLICE_S

    def overlap(self, true: Move) -> float:
        """Intersection over union of the two times, 0 to 1."""
        both = min(self.end_s, true.end_s) - max(self.start_s, true.start_s)
        either = max(self.end_s, true.end_s) - min(self.start_s, true.start_s)
        return max(0.0, both) / either if either > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Judged:
    """What is right of one answer. Each field demands those before it, except that `near` and `overlapping` do not
    demand each other.

    readable: it has a JSON list of moments. inside: all its times are of the clip, each end after its start. near: it
    has as many moments as the scene has moves, and each is near its move. overlapping: the same, by an overlap of at
    least LEAST_OVERLAP. described: it is near, and each description is that of the move.
    """

    readable: bool
    inside: bool
    near: bool
    overlapping: bool
    described: bool


def times_of(duration_s: int) -> ClipTimes:
    """The times of a clip at SAMPLE_FPS, of two frames a slice."""
    begins = tuple(number * SLICE_S for number in range(int(duration_s / SLICE_S)))
    between_s = 1 / SAMPLE_FPS
    return ClipTimes(0, begins, tuple(begin + between_s / 2 for begin in begins), duration_s - between_s)


def moves_of(scene: Scene) -> list[Move]:
    """Those within the scene's duration, in the order of their starts."""
    found = [
        Move(thing.motion.start_s, thing.motion.stop_s, f"a {thing.name} moves {thing.motion.direction}")
        for thing in scene.things
        if thing.motion is not None and thing.motion.start_s < scene.duration_s
    ]
    return sorted(found, key=lambda move: move.start_s)


def answer_of(scene: Scene) -> str:
    """The moves as the list that the grammar of moments demands."""
    times = NOTATION.spelled(times_of(scene.duration_s), None, "")

    def nearest(time_s: float) -> str:
        text: str = json.loads(min(times, key=lambda each: abs(times[each] - time_s)))
        return text

    return json.dumps(
        [
            {"start_time": nearest(move.start_s), "end_time": nearest(move.end_s), "description": move.description}
            for move in moves_of(scene)
        ]
    )


def moves_question(scene: Scene, rng: Random) -> Question:
    return Question(KIND, rng.choice(ASKED), answer_of(scene))


def told_by(text: str) -> list[Move] | None:
    """The first JSON list of a text, if it is one of moments; times may be seconds or `mm:ss`, in any precision."""
    try:
        told, _ = json.JSONDecoder().raw_decode(text, text.index("["))
        return [
            Move(_seconds(each["start_time"]), _seconds(each["end_time"]), str(each["description"])) for each in told
        ]
    except (ValueError, LookupError, TypeError):
        return None


def judged(told: Sequence[Move] | None, scene: Scene) -> Judged:
    """told: as of `told_by`, in any order."""
    if told is None:
        return Judged(False, False, False, False, False)
    end_s, true = times_of(scene.duration_s).end_s, moves_of(scene)
    inside = all(0 <= move.start_s < move.end_s <= end_s for move in told)
    if not inside or len(told) != len(true):
        return Judged(True, inside, False, False, False)
    pairs = [*zip(sorted(told, key=lambda move: move.start_s), true, strict=True)]
    near = all(move.is_near(of) for move, of in pairs)
    return Judged(
        readable=True,
        inside=True,
        near=near,
        overlapping=all(move.overlap(of) >= LEAST_OVERLAP for move, of in pairs),
        described=near and all(move.description == of.description for move, of in pairs),
    )


def _seconds(told: object) -> float:
    parts = str(told).removesuffix("s").split(":")
    return sum((float(part) * 60.0**place for place, part in enumerate(reversed(parts))), 0.0)
