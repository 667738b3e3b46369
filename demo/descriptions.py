"""Texts that describe what is seen in a part of a clip, and the parts that each text is true of.

A description names events: an object, what it does, where it stands. It is true of every part that shows these events,
whatever else the part shows, so a search for it has as many right answers. It knows nothing of pixels or models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from random import Random

from demo.questions import place_of
from demo.scenes import Scene, Thing
from demo.wordings import COLOURS, DIRECTIONS, PLACES, SHAPES

STILL = "still"
# A part of a clip shows a move from this share of its duration on, and none up to this much of it, in seconds.
SHOWN_SHARE, UNSEEN_S = 0.8, 0.1
# It shows an object that is there for so long, and none that is there for less than UNSEEN_S.
THERE_S = 1.0
_MOVING = ("moves {}", "moves {}", "moving {}", "goes {}", "moves {towards}")
_TOWARDS = {"left": "to the left", "right": "to the right", "up": "upwards", "down": "downwards"}
_STANDING = ("stands still", "stands still", "standing still", "does not move")


@dataclass(frozen=True, slots=True)
class Event:
    """One object and what it does: a direction, or STILL. None: not told, or for `place` in no quarter of the frame."""

    colour: str | None
    shape: str | None
    does: str | None
    place: str | None = None

    def tells_of(self, seen: Event) -> bool:
        """Whether it is true of an object of which all is told."""
        return all(own is None or own == other for own, other in zip(astuple(self), astuple(seen), strict=True))


@dataclass(frozen=True, slots=True)
class Description:
    text: str
    events: tuple[Event, ...]

    def holds(self, seen: Sequence[Event]) -> bool:
        """seen: the objects of a part of a clip. Two events never name the same object."""
        return all(any(event.tells_of(one) for one in seen) for event in self.events)


def seen_in(scene: Scene, start_s: float, stop_s: float) -> tuple[Event, ...] | None:
    """The objects between two times, in the order of `COLOURS`; None if a move or an object is there in part."""
    found = []
    for thing in sorted(scene.things, key=lambda each: COLOURS.index(each.colour)):
        there_s = min(thing.until_s, stop_s) - max(thing.from_s, start_s)
        if there_s <= UNSEEN_S:
            continue
        does = _does(thing, start_s, stop_s)
        if there_s < THERE_S or does is None:
            return None
        still = thing.motion is None and scene.camera.motion is None
        found.append(Event(thing.colour, thing.shape, does, place_of(thing) if still else None))
    return tuple(found)


def _does(thing: Thing, start_s: float, stop_s: float) -> str | None:
    if thing.motion is None:
        return STILL
    shown_s = min(thing.motion.stop_s, stop_s) - max(thing.motion.start_s, start_s)
    if shown_s <= UNSEEN_S:
        return STILL
    return thing.motion.direction if shown_s >= SHOWN_SHARE * (thing.motion.stop_s - thing.motion.start_s) else None


def caption(seen: Sequence[Event]) -> Description:
    """All that is told of all objects: `A red circle moves left and a blue cross stands still at the top right.`"""
    clauses = []
    for event in seen:
        does = "stands still" if event.does == STILL else f"moves {event.does}"
        place = f" at the {event.place}" if event.place else ""
        clauses.append(f"a {event.colour} {event.shape} {does}{place}")
    text = " and ".join([", ".join(clauses[:-1]), clauses[-1]] if len(clauses) > 1 else clauses)
    return Description(f"{text[0].upper()}{text[1:]}.", tuple(seen))


def described(seen: Sequence[Event], rng: Random) -> Description:
    """Some of it, in random words."""
    told = [
        replace(
            event, does=event.does if rng.random() < 0.85 else None, place=event.place if rng.random() < 0.4 else None
        )
        for event in rng.sample(seen, rng.choice((1, 1, min(2, len(seen)), len(seen))))
    ]
    if len(told) == 1:
        (event,) = told
        missing = rng.choice((None, None, None, "colour", "shape"))
        told = [replace(event, **{missing: None})] if missing else told
    return Description(_worded(told, rng), tuple(told))


def altered(seen: Sequence[Event], rng: Random) -> Description:
    """A description of the same objects in which one of them is another, does something else or stands elsewhere."""
    told = list(described(seen, rng).events)
    index = rng.randrange(len(told))
    event = told[index]
    shown = next(one for one in seen if event.tells_of(one))
    changes: dict[str, Sequence[str]] = {"colour": COLOURS, "shape": SHAPES, "does": (*DIRECTIONS, STILL)}
    if event.place and event.does == STILL:
        changes["place"] = PLACES
    name = rng.choice([*changes, "does"])
    other = rng.choice([each for each in changes[name] if each != getattr(shown, name)])
    place = None if name == "does" else event.place
    told[index] = replace(event, place=place, **{name: other}) if name != "place" else replace(event, place=other)
    return Description(_worded(told, rng), tuple(told))


def exchanged(seen: Sequence[Event], rng: Random) -> tuple[Event, ...]:
    """The same objects, of which two do and stand as the other."""
    if len(seen) < 2:
        return tuple(seen)
    one, other = rng.sample(range(len(seen)), 2)
    found = list(seen)
    for at, by in ((one, other), (other, one)):
        found[at] = replace(seen[at], does=seen[by].does, place=seen[by].place)
    return tuple(found)


def first_event(seen: Sequence[Event]) -> Description:
    """Of the first object that moves, or of the first: `a red circle moves left`."""
    event = next((each for each in seen if each.does != STILL), seen[0])
    does = "stands still" if event.does == STILL else f"moves {event.does}"
    return Description(f"a {event.colour} {event.shape} {does}", (replace(event, place=None),))


def _worded(told: Sequence[Event], rng: Random) -> str:
    article = rng.choice(("a ", "a ", "the ", ""))
    clauses = [f"{article}{_clause(event, rng)}" for event in told]
    text = rng.choice((" and ", ", ")).join(clauses)
    return f"{text[0].upper()}{text[1:]}." if rng.random() < 0.4 else text


def _clause(event: Event, rng: Random) -> str:
    words = [event.colour, event.shape or "object"]
    if event.does == STILL:
        words.append(rng.choice(_STANDING))
    elif event.does:
        words.append(rng.choice(_MOVING).format(event.does, towards=_TOWARDS[event.does]))
    if event.place:
        words.append(f"at the {event.place}")
    return " ".join(word for word in words if word)
