"""What can be asked about a scene, and the one right answer to each question.

An answer that names two objects names them in the order of `COLOURS`, so that exact match is a fair measure.
It knows nothing of pixels or of models.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from demo.scenes import Scene, Thing
from demo.wordings import COLOURS, WORDINGS

# Moves start well before or well after the middle of a clip, in either playing direction.
MIDDLE_S = 7.9


@dataclass(frozen=True, slots=True)
class Question:
    kind: str
    text: str
    answer: str


def questions_about(scene: Scene, rng: Random) -> list[Question]:
    """Every question that the scene's clip answers, each in one random wording."""
    asked = _still_questions(scene, rng, "video")
    movers = sorted(scene.movers, key=_place_in_answer)
    asked += [
        _question(rng, "anything", "yes" if movers else "no"),
        _question(rng, "mover", " and ".join(f"the {thing.name}" for thing in movers) or "nothing"),
        _question(rng, "happens", _sentence([f"a {thing.name} {_does(thing)}" for thing in sorted(scene.things, key=_place_in_answer)])),
    ]
    for thing in scene.things:
        for kind in ("direction", "does_move"):
            asked.append(_about(rng, kind, _reference(scene, thing, rng), _does(thing)))
        if thing.motion:
            when = "early" if thing.motion.start_s < MIDDLE_S else "late"
            asked.append(_about(rng, "when", _reference(scene, thing, rng), f"moves {when}"))
    if len(movers) == 1:
        asked.append(_about(rng, "mover_colour", "moving object", f"is {movers[0].colour}"))
        asked.append(_about(rng, "mover_shape", "moving object", f"is a {movers[0].shape}"))
        asked.append(_about(rng, "direction", "moving object", _does(movers[0])))
    if len(movers) == 2:
        first = min(movers, key=lambda thing: thing.motion.start_s if thing.motion else 0.0)
        asked.append(_question(rng, "first", f"the {first.name}"))
    return asked


def picture_questions(scene: Scene, rng: Random) -> list[Question]:
    """Every question that a single frame of the scene answers, each in one random wording."""
    names = [f"a {thing.name}" for thing in sorted(scene.things, key=_place_in_answer)]
    return [*_still_questions(scene, rng, "image"), _question(rng, "picture", _sentence(names))]


def _still_questions(scene: Scene, rng: Random, medium: str) -> list[Question]:
    count = "one" if len(scene.things) == 1 else "two"
    asked = [Question("count", rng.choice(WORDINGS["count"]).format(medium=medium), count)]
    for thing in scene.things:
        alone = len(scene.things) == 1
        if alone or len({other.shape for other in scene.things}) == 2:
            reference = rng.choice(("object", thing.shape)) if alone else thing.shape
            asked.append(_about(rng, "colour", reference, f"is {thing.colour}"))
        reference = rng.choice(("object", f"{thing.colour} object")) if alone else f"{thing.colour} object"
        asked.append(_about(rng, "shape", reference, f"is a {thing.shape}"))
    return asked


def _question(rng: Random, kind: str, answer: str) -> Question:
    return Question(kind, rng.choice(WORDINGS[kind]), answer)


def _about(rng: Random, kind: str, thing: str, told: str) -> Question:
    """A question about one object, answered by a sentence that names the object as the question does."""
    return Question(kind, rng.choice(WORDINGS[kind]).format(thing=thing), f"The {thing} {told}.")


def _reference(scene: Scene, thing: Thing, rng: Random) -> str:
    """Words that single one object out: its colour and shape always do."""
    choices = [thing.name, thing.name, f"{thing.colour} object"]
    if len(scene.things) == 1:
        choices.append("object")
    if [other.shape for other in scene.things].count(thing.shape) == 1:
        choices.append(thing.shape)
    return rng.choice(choices)


def _place_in_answer(thing: Thing) -> int:
    return COLOURS.index(thing.colour)


def _does(thing: Thing) -> str:
    return f"moves {thing.motion.direction}" if thing.motion else "stands still"


def _sentence(clauses: list[str]) -> str:
    text = " and ".join(clauses)
    return f"{text[0].upper()}{text[1:]}."
