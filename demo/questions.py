"""The questions about a scene, each with exactly one correct answer.

An answer with two objects names them in the order of `COLOURS`, so that exact match is a fair measure. It knows nothing
of pixels or models.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

from demo.scenes import Scene, Thing
from demo.wordings import COLOURS, WORDINGS

# Moves start clearly before or after the middle of a clip, forwards and backwards.
MIDDLE_S = 7.9


@dataclass(frozen=True, slots=True)
class Question:
    kind: str
    text: str
    answer: str


def questions_about(scene: Scene, rng: Random) -> list[Question]:
    """Every question that the scene's clip answers, each in one random wording.

    With two moving objects, no question requires matching a motion to one of them.
    """
    asked = _still_questions(scene, rng, "video")
    movers = sorted(scene.movers, key=_place_in_answer)
    asked.append(_question(rng, "anything", "yes" if movers else "no"))
    asked.append(_question(rng, "mover", " and ".join(f"the {thing.name}" for thing in movers) or "nothing"))
    if len(scene.things) == 1:
        for kind in ("direction", "does_move"):
            asked.append(_about(rng, kind, _reference(scene.things[0], rng), _does(scene.things[0])))
    if len(movers) == 1:
        mover = movers[0]
        when = "early" if _start_s(mover) < MIDDLE_S else "late"
        asked.append(_about(rng, "when", "moving object", f"moves {when}"))
        asked.append(_about(rng, "mover_colour", "moving object", f"is {mover.colour}"))
        asked.append(_about(rng, "mover_shape", "moving object", f"is a {mover.shape}"))
        asked.append(_about(rng, "direction", "moving object", _does(mover)))
    if len(movers) == 2:
        asked.append(_question(rng, "first", f"the {min(movers, key=_start_s).name}"))
    else:
        told = [f"a {thing.name} {_does(thing)}" for thing in sorted(scene.things, key=_place_in_answer)]
        asked.append(_question(rng, "happens", _sentence(told)))
    return asked


def picture_questions(scene: Scene, rng: Random) -> list[Question]:
    """Every question that a single frame of the scene answers, each in one random wording."""
    names = [f"a {thing.name}" for thing in sorted(scene.things, key=_place_in_answer)]
    return [*_still_questions(scene, rng, "image"), _question(rng, "picture", _sentence(names))]


def _still_questions(scene: Scene, rng: Random, medium: str) -> list[Question]:
    alone = len(scene.things) == 1
    asked = [Question("count", rng.choice(WORDINGS["count"]).format(medium=medium), "one" if alone else "two")]
    for thing in scene.things:
        asked.append(
            _about(rng, "shape", rng.choice(("object",) * alone + (f"{thing.colour} object",)), f"is a {thing.shape}")
        )
        if alone:
            asked.append(_about(rng, "colour", rng.choice(("object", thing.shape)), f"is {thing.colour}"))
    return asked


def _question(rng: Random, kind: str, answer: str) -> Question:
    return Question(kind, rng.choice(WORDINGS[kind]), answer)


def _about(rng: Random, kind: str, thing: str, told: str) -> Question:
    """A question about one object; the answer is a sentence that names the object as the question does."""
    return Question(kind, rng.choice(WORDINGS[kind]).format(thing=thing), f"The {thing} {told}.")


def _reference(thing: Thing, rng: Random) -> str:
    return rng.choice((thing.name, thing.name, f"{thing.colour} object", thing.shape, "object"))


def _place_in_answer(thing: Thing) -> int:
    return COLOURS.index(thing.colour)


def _start_s(thing: Thing) -> float:
    return thing.motion.start_s if thing.motion else math.inf


def _does(thing: Thing) -> str:
    return f"moves {thing.motion.direction}" if thing.motion else "stands still"


def _sentence(clauses: list[str]) -> str:
    text = " and ".join(clauses)
    return f"{text[0].upper()}{text[1:]}."
