"""The requests of the soak: good questions of every kind, and bad ones that must be refused.

Fixed questions are asked once before the storm; later answers to them must be the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from demo.drawing import encode
from demo.scenes import random_scene
from gridsieve.bench.clips import stamped
from gridsieve.client.prompt import Image, Options, PartLike, Video
from gridsieve.common.contract.errors import GridsieveError, InvalidRequest, MediaForbidden
from gridsieve.common.contract.retention import AUTO_THRESHOLD, EVS, PIXEL_CHANGE
from tests import media

CLIPS = 6
FIRST_SEED = 12_300_000
TEXTS = ("What moves?", "What happens?", "How many objects are there?")
PRUNINGS: dict[str, Options] = {
    "0": {"pruning_rate": 0.0},
    "0.5": {"pruning_rate": 0.5, "pruning_method": EVS},
    "0.75": {"pruning_rate": 0.75, "pruning_method": EVS},
    "0.75, before the tower": {"pruning_rate": 0.75, "pruning_method": PIXEL_CHANGE},
    "a threshold": {"pruning_threshold": AUTO_THRESHOLD},
}


@dataclass(frozen=True, slots=True)
class Question:
    """One request.

    kind: its row in the report. known: a name shared by questions with the same answer, "" if it is unknown.
    refused_as: the expected error, None for good questions; may_pass: it may be answered instead.
    """

    kind: str
    media: PartLike | Sequence[PartLike] | None = field(repr=False)
    text: str
    options: Options
    refused_as: type[GridsieveError] | None = None
    known: str = ""
    may_pass: bool = False


class Questions:
    """Draws questions from a seed."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._clips = [encode(random_scene(FIRST_SEED + number)) for number in range(CLIPS)]
        self._pictures = [media.picture(400, 300, seed) for seed in range(2)]

    def fixed(self) -> list[Question]:
        """The questions whose answers never change."""
        found = []
        for number, clip in enumerate(self._clips):
            for name, pruning in PRUNINGS.items():
                text = TEXTS[number % len(TEXTS)]
                options: Options = {**pruning, "temperature": 0, "max_new_tokens": 12}
                found.append(Question("video", Video(data=clip), text, options, known=f"clip {number} at {name}"))
        return found

    def draw(self) -> Question:
        good = self._random.random() < 0.85
        return self._random.choice(self._good() if good else self._bad())()

    def _good(self) -> list[Callable[[], Question]]:
        return [self._known, self._known, self._new, self._new, self._image, self._two, self._several, self._no_media]

    def _bad(self) -> list[Callable[[], Question]]:
        return [self._noise, self._damaged, self._rate, self._path, self._reaching, self._long, self._method]

    # --- good ----------------------------------------------------------------------------------------------------

    def _known(self) -> Question:
        return self._random.choice(self.fixed())

    def _new(self) -> Question:
        """A known clip with other bytes, which no cache holds."""
        asked = self._known()
        assert isinstance(asked.media, Video)
        assert asked.media.data is not None
        return Question(
            "new video", Video(data=stamped(asked.media.data)), asked.text, asked.options, known=asked.known
        )

    def _image(self) -> Question:
        picture = Image(data=self._random.choice(self._pictures), max_pixels=self._random.choice((112, 224)) ** 2)
        return Question("image", picture, "What is it?", {"max_new_tokens": 4})

    def _two(self) -> Question:
        clip, picture = self._random.choice(self._clips), self._random.choice(self._pictures)
        media: list[PartLike] = [Video(data=clip), Image(data=picture)]
        return Question("video and image", media, "And now?", {"pruning_rate": 0.75, "max_new_tokens": 6})

    def _several(self) -> Question:
        options: Options = {"n": 3, "temperature": 1.0, "seed": self._random.getrandbits(31), "max_new_tokens": 8}
        return Question("several answers", Video(data=self._random.choice(self._clips)), TEXTS[0], options)

    def _no_media(self) -> Question:
        options: Options = {"max_new_tokens": self._random.randrange(1, 80), "ignore_eos": True}
        return Question("text alone", None, f"Number {self._random.getrandbits(20)}?", options)

    # --- bad -----------------------------------------------------------------------------------------------------

    def _noise(self) -> Question:
        return Question("noise", Video(data=os.urandom(5000)), "What?", {}, InvalidRequest)

    def _damaged(self) -> Question:
        clip = bytearray(stamped(self._random.choice(self._clips)))
        third = len(clip) // 3
        clip[third : 2 * third] = os.urandom(third)
        return Question(
            "damaged", Video(data=bytes(clip)), "What?", {"max_new_tokens": 4}, InvalidRequest, may_pass=True
        )

    def _rate(self) -> Question:
        return Question("rate", Video(data=self._clips[0]), "What?", {"pruning_rate": 1.5}, InvalidRequest)

    def _path(self) -> Question:
        return Question("path", Video(server_path="../../etc/passwd"), "What?", {}, MediaForbidden)

    def _reaching(self) -> Question:
        return Question("url", Video(url="http://169.254.169.254/latest"), "What?", {}, MediaForbidden)

    def _long(self) -> Question:
        return Question("too long", None, "word " * 40_000, {}, InvalidRequest)

    def _method(self) -> Question:
        return Question("method", Video(data=self._clips[0]), "What?", {"pruning_method": "best"}, InvalidRequest)
