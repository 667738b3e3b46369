"""Where the caller of a request wrote what the fields of gRPC's messages hold, for errors that name them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from framesieve.common.contract.errors import FramesieveError

_MEDIA = re.compile(
    r"prompt\.messages\[(\d+)\]\.parts\[(\d+)\]\.(?:image|video)"
    r"(?:\.(frame_sampling|pruning)\.(\w+)|\.frames\.(pictures|timestamps_s)\[(\d+)\]|\.\w+)?"
)
_SAMPLING = re.compile(r"\b(?:frame_sampling|FrameSampling)\.(\w+)")
_OPTION = re.compile(r"\b(?:sampling|Sampling)\.(\w+)")
_PRUNING = re.compile(r"\bPruning\.(\w+)")
_OF_FRAME = {"pictures": "frame", "timestamps_s": "the time of frame"}
_FRAME_CHOICE = {"start_s": "video_start", "end_s": "video_end"}


@dataclass(frozen=True, slots=True)
class MediaNames:
    """location: of the media's URL or file. pruning: of the item's pruning, its own or the request's. sampling: of the
    fields of FrameSampling that the caller set."""

    location: str
    pruning: str = "pruning"
    sampling: Mapping[str, str] = field(default_factory=dict)


class FieldNames:
    """media: by message and part. options: of fields of Sampling, by their names there, where they differ."""

    def __init__(self) -> None:
        self.media: dict[tuple[int, int], MediaNames] = {}
        self.options: dict[str, str] = {}

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Puts the caller's names into errors."""
        try:
            yield
        except FramesieveError as error:
            error.args = (self.renamed(str(error)),)
            raise

    def renamed(self, message: str) -> str:
        """The text of an error with the caller's names."""
        found = _MEDIA.search(message)
        place = (int(found[1]), int(found[2])) if found else None
        own = self.media.get(place) if place else None
        message = _MEDIA.sub(self._of_media, message)
        message = _PRUNING.sub(r"pruning.\1", message)
        message = _SAMPLING.sub(lambda found: self._of_sampling(found[1], own), message)
        return _OPTION.sub(lambda found: self.options.get(found[1], found[1]), message)

    def _of_media(self, found: re.Match[str]) -> str:
        own = self.media.get((int(found[1]), int(found[2])))
        part = f"messages[{found[1]}].content[{found[2]}]"
        if found[3] == "frame_sampling":
            return self._of_sampling(found[4], own)
        if found[3] == "pruning":
            return f"{own.pruning if own else 'pruning'}.{found[4]}"
        location = own.location if own else part
        if found[5]:  # the caller has one field for all frames
            return f"{location} at {_OF_FRAME[found[5]]} {found[6]}"
        return location

    def _of_sampling(self, name: str, own: MediaNames | None) -> str:
        known = own.sampling.get(name) if own else None
        return known or f"mm_processor_kwargs.{_FRAME_CHOICE.get(name, name)}"
