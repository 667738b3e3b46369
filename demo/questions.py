"""What can be asked about a scene, and the one right answer to each question.

An answer that names two objects names them in the order of `COLOURS`, so that exact match is a fair measure.
It knows nothing of pixels or of models.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from demo.scenes import Scene, Thing
from demo.wordings import COLOURS, STILL, WORDINGS

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
        _question(rng, "happens", _sentence([_told(thing) for thing in sorted(scene.things, key=_place_in_answer)])),
    ]
    for thing in scene.things:
        moves = thing.motion is not None
        direction = thing.motion.direction if thing.motion else STILL
        asked.append(_question(rng, "direction", direction, _reference(scene, thing, rng)))
        asked.append(_question(rng, "does_move", "yes" if moves else "no", _reference(scene, thing, rng)))
        if thing.motion:
            when = "early" if thing.motion.start_s < MIDDLE_S else "late"
            asked.append(_question(rng, "when", when, _reference(scene, thing, rng)))
    if len(movers) == 1:
        asked.append(_question(rng, "mover_colour", movers[0].colour))
        asked.append(_question(rng, "mover_shape", movers[0].shape))
        asked.append(
            _question(rng, "direction", movers[0].motion.direction if movers[0].motion else "", "moving object")
        )
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
            asked.append(_question(rng, "colour", thing.colour, reference))
        reference = rng.choice(("object", f"{thing.colour} object")) if alone else f"{thing.colour} object"
        asked.append(_question(rng, "shape", thing.shape, reference))
    return asked


def _question(rng: Random, kind: str, answer: str, thing: str = "") -> Question:
    return Question(kind, rng.choice(WORDINGS[kind]).format(thing=thing), answer)


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


def _told(thing: Thing) -> str:
    return f"a {thing.name} " + (f"moves {thing.motion.direction}" if thing.motion else "stands still")


def _sentence(clauses: list[str]) -> str:
    text = " and ".join(clauses)
    return f"{text[0].upper()}{text[1:]}."
