"""The demo's language: all wordings of each kind of question, and the words of the answers.

`demo.questions` fills in the wordings, and `demo.checkpoint` trains its tokenizer on them.
"""

from __future__ import annotations

COLOURS = ("red", "green", "blue", "yellow", "cyan", "magenta")
SHAPES = ("circle", "square", "triangle", "cross")
DIRECTIONS = ("left", "right", "up", "down")
NUMBERS = ("no", "one", "two", "three", "four")
PLACES = ("top left", "top right", "bottom left", "bottom right")
STILL = "it stands still"

# {thing} is "red circle", "circle", "object" …: a phrase that identifies one object.
WORDINGS: dict[str, tuple[str, ...]] = {
    "colour": (
        "What colour is the {thing}?",
        "What color is the {thing}?",
        "Which colour does the {thing} have?",
        "What is the colour of the {thing}?",
    ),
    "shape": (
        "What shape is the {thing}?",
        "Which shape does the {thing} have?",
        "What is the shape of the {thing}?",
    ),
    "count": (
        "How many objects are there?",
        "How many objects do you see?",
        "How many shapes are in the {medium}?",
    ),
    "direction": (
        "Which way does the {thing} move?",
        "In which direction does the {thing} move?",
        "Where does the {thing} go?",
        "Which way is the {thing} moving?",
    ),
    "does_move": (
        "Does the {thing} move?",
        "Is the {thing} moving?",
        "Does the {thing} ever move?",
    ),
    "anything": (
        "Does anything move?",
        "Is anything moving?",
        "Does something move in the video?",
    ),
    "mover": (
        "What moves?",
        "What is moving?",
        "Which object moves?",
        "What moves in the video?",
    ),
    "mover_colour": (
        "What colour is the moving object?",
        "What color is the object that moves?",
        "Which colour does the moving object have?",
    ),
    "mover_shape": (
        "What shape is the moving object?",
        "Which shape moves?",
        "What is the shape of the object that moves?",
    ),
    "when": (
        "Does the {thing} move early or late?",
        "When does the {thing} move, early or late?",
        "Is it early or late when the {thing} moves?",
    ),
    "first": (
        "Which object moves first?",
        "What moves first?",
        "Which of the two moves first?",
    ),
    "count_moving": (
        "How many objects move?",
        "How many objects are moving?",
        "How many of the objects move?",
    ),
    "stands": (
        "What stands still?",
        "Which objects stand still?",
        "What does not move?",
    ),
    "where": (
        "Where is the {thing}?",
        "Where do you see the {thing}?",
        "In which corner is the {thing}?",
    ),
    "beginning": (
        "What is there at the beginning?",
        "What do you see at the beginning?",
        "Which objects are there at first?",
    ),
    "end": (
        "What is there at the end?",
        "What do you see at the end?",
        "Which objects are there at last?",
    ),
    "cut": (
        "Is there a cut?",
        "Is there a cut in the video?",
        "Does the scene change?",
    ),
    "happens": (
        "What happens?",
        "What happens in the video?",
        "Describe the video.",
        "What do you see in the video?",
    ),
    "picture": (
        "What do you see in the image?",
        "Describe the image.",
        "What is in the image?",
    ),
}

SYSTEM_PROMPT = "You are a helpful assistant."


def sentences() -> list[str]:
    """Text with every word of the demo's questions and answers, to train the tokenizer on."""
    things = [f"{colour} {shape}" for colour in COLOURS for shape in SHAPES]
    things += ["object", "moving object", *(f"{colour} object" for colour in COLOURS)]
    asked = [
        wording.format(thing=thing, medium=medium)
        for wordings in WORDINGS.values()
        for wording in wordings
        for thing in things
        for medium in ("video", "image")
    ]
    told = [f"A {thing} moves {direction} and a {thing} stands still." for thing in things for direction in DIRECTIONS]
    told += [f"the {thing} and the {thing}. A {thing} and a {thing}." for thing in things]
    told += [f"The {thing} is at the {place}." for thing in things for place in PLACES]
    told += [f"a {thing}, a {thing} and a {thing}" for thing in things]
    plain = [*COLOURS, *SHAPES, *DIRECTIONS, *NUMBERS, STILL, "yes", "no", "nothing", "early", "late"]
    return asked + told + plain * 20 + [f"system\n{SYSTEM_PROMPT}", "user\n", "assistant\n"] * 20
