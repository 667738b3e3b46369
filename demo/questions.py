"""The questions about a scene, each with exactly one correct answer.

An answer with several objects names them in the order of `COLOURS`, so that exact match is a fair measure. It knows
nothing of pixels or models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from demo.scenes import DURATION_S, Scene, Thing
from demo.wordings import COLOURS, NUMBERS, WORDINGS

# Moves start clearly before or after the middle of a clip, forwards and backwards.
MIDDLE_S = 7.9
# Objects nearer to the middle of the frame are in no quarter of it.
MIDDLE_SHARE = 0.07
# How often scenes without a cut are asked for one.
CUT_ASKED = 0.15
# What each kind of question is about.
TOPICS = {
    "what stands": ("colour", "shape", "stands", "beginning", "end"),
    "what moves": ("anything", "does_move", "mover", "mover_colour", "mover_shape", "happens", "cut"),
    "when": ("when", "first"),
    "where": ("where",),
    "where to": ("direction",),
    "how many": ("count", "count_moving"),
}


@dataclass(frozen=True, slots=True)
class Question:
    kind: str
    text: str
    answer: str


def questions_about(scene: Scene, rng: Random) -> list[Question]:
    """Every question that the scene's clip answers, each in one random wording."""
    movers = in_order(scene.movers)
    asked = [
        _question(rng, "anything", "yes" if movers else "no"),
        _question(rng, "mover", names("the", movers)),
        _question(rng, "count_moving", NUMBERS[len(movers)]),
    ]
    if scene.cut_s is not None or rng.random() < CUT_ASKED:
        asked.append(_question(rng, "cut", "no" if scene.cut_s is None else "yes"))
    if len(movers) == 1:
        asked.append(_about(rng, "mover_colour", "moving object", f"is {movers[0].colour}"))
        asked.append(_about(rng, "mover_shape", "moving object", f"is a {movers[0].shape}"))
        asked.append(_about(rng, "direction", "moving object", _does(movers[0])))
    if len(movers) > 1:
        asked.append(_question(rng, "first", f"the {min(movers, key=_start_s).name}"))
    if scene.cut_s is not None:
        for kind, time_s in (("beginning", 0.0), ("end", float(DURATION_S))):
            asked.append(_question(rng, kind, names("a", in_order(scene.things_at(time_s)))))
        return asked
    asked += _still_questions(scene, rng, "video")
    asked.append(_question(rng, "stands", names("the", in_order(set(scene.things) - set(movers)))))
    for thing in scene.things:
        asked.append(_about(rng, "does_move", _reference(scene, thing, rng), _does(thing)))
        if thing.motion is not None:
            asked.append(_about(rng, "direction", _reference(scene, thing, rng), _does(thing)))
            told = "early" if _start_s(thing) < MIDDLE_S else "late"
            asked.append(_about(rng, "when", _reference(scene, thing, rng, movers), f"moves {told}"))
        asked += _place_questions(scene, thing, rng)
    if len(scene.things) <= 2:
        clauses = [f"a {thing.name} {_does(thing)}" for thing in in_order(scene.things)]
        asked.append(_question(rng, "happens", _sentence(clauses)))
    return asked


def picture_questions(scene: Scene, rng: Random) -> list[Question]:
    """Every question that a single frame of a scene with one shot answers, each in one random wording."""
    names = [f"a {thing.name}" for thing in in_order(scene.things)]
    asked = [*_still_questions(scene, rng, "image"), _question(rng, "picture", _sentence(names))]
    for thing in scene.things:
        asked += _place_questions(scene, thing, rng)
    return asked


def _place_questions(scene: Scene, thing: Thing, rng: Random) -> list[Question]:
    """Of an object that stays in one quarter of the frame."""
    if thing.motion is not None or scene.camera.motion is not None or not (place := place_of(thing)):
        return []
    return [_about(rng, "where", _reference(scene, thing, rng), f"is at the {place}")]


def _still_questions(scene: Scene, rng: Random, medium: str) -> list[Question]:
    text = rng.choice(WORDINGS["count"]).format(medium=medium)
    asked = [Question("count", text, NUMBERS[len(scene.things)])]
    alone = len(scene.things) == 1
    for thing in scene.things:
        asked.append(
            _about(rng, "shape", rng.choice(("object",) * alone + (f"{thing.colour} object",)), f"is a {thing.shape}")
        )
        if _only(scene, thing):
            asked.append(_about(rng, "colour", rng.choice(("object",) * alone + (thing.shape,)), f"is {thing.colour}"))
    return asked


def _question(rng: Random, kind: str, answer: str) -> Question:
    return Question(kind, rng.choice(WORDINGS[kind]), answer)


def _about(rng: Random, kind: str, thing: str, told: str) -> Question:
    """A question about one object; the answer is a sentence that names the object as the question does."""
    return Question(kind, rng.choice(WORDINGS[kind]).format(thing=thing), f"The {thing} {told}.")


def _reference(scene: Scene, thing: Thing, rng: Random, movers: Sequence[Thing] = ()) -> str:
    """A phrase that identifies an object; if `movers` has only this, it may be the one that moves."""
    known = [thing.name, thing.name, f"{thing.colour} object"]
    if _only(scene, thing):
        known.append(thing.shape)
    if len(scene.things) == 1:
        known.append("object")
    if list(movers) == [thing]:
        known.append("moving object")
    return rng.choice(known)


def _only(scene: Scene, thing: Thing) -> bool:
    """Whether no other object has its shape."""
    return sum(other.shape == thing.shape for other in scene.things) == 1


def in_order(things: Sequence[Thing] | set[Thing]) -> list[Thing]:
    return sorted(things, key=lambda thing: COLOURS.index(thing.colour))


def names(article: str, things: Sequence[Thing]) -> str:
    """`the red circle`, `a red circle, a blue cross and a cyan square`, `nothing`."""
    names = [f"{article} {thing.name}" for thing in things] or ["nothing"]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def place_of(thing: Thing) -> str | None:
    """The quarter of the frame where it stands; None in the middle."""
    if min(abs(thing.x - 0.5), abs(thing.y - 0.5)) < MIDDLE_SHARE:
        return None
    return f"{'top' if thing.y < 0.5 else 'bottom'} {'left' if thing.x < 0.5 else 'right'}"


def _start_s(thing: Thing) -> float:
    return thing.motion.start_s if thing.motion else math.inf


def _does(thing: Thing) -> str:
    return f"moves {thing.motion.direction}" if thing.motion else "stands still"


def _sentence(clauses: Sequence[str]) -> str:
    text = " and ".join(clauses)
    return f"{text[0].upper()}{text[1:]}."
