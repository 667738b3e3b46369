"""A checked prompt: its turns, its tools, and its media with the place that each comes from.

It knows neither protobuf nor how media are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gridsieve.common.contract.plan import Modality
from gridsieve.services.preprocessing.prompt.embeds import Embeds
from gridsieve.services.preprocessing.prompt.plain_text import LARGE_TEXT_CHARS
from gridsieve.services.preprocessing.prompt.turns import Tool, Turn
from gridsieve.services.preprocessing.sources.source import Source
from gridsieve.services.preprocessing.video.pictures import PictureFrames
from gridsieve.services.preprocessing.video.sampling import FrameSampling

# Of text, which takes as long as a slice of embeddings.
_SLICE_CHARS = 32


@dataclass(frozen=True, slots=True)
class MediaUrl:
    """A URL, which the caller fetches before planning."""

    url: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class FileUrl:
    """A file URL, by the path in it."""

    path: str


@dataclass(frozen=True, slots=True)
class Upload:
    """A file that was uploaded to the gateway, by its path below --upload-root."""

    path: str


@dataclass(frozen=True, slots=True)
class MediaFile:
    """A file that follows the prompt, which the caller receives before planning."""

    size_bytes: int


@dataclass(frozen=True, slots=True)
class MediaRequest:
    """One media item of a prompt.

    modality: as the caller declared it. The bytes decide, see `Planner.plan`.
    location: its bytes, its path below a root, its embeddings, its URL, the file that follows the prompt, or
        the source of a fetched or received file.
    frames: of a video whose file is pictures, one after the other. hears: whether the model hears a video's sound, too.
    """

    name: str
    modality: Modality
    location: bytes | str | Embeds | MediaUrl | FileUrl | Upload | MediaFile | Source = field(repr=False)
    sampling: FrameSampling
    frames: PictureFrames | None = None
    hears: bool = False


@dataclass(frozen=True, slots=True)
class Conversation:
    """A checked prompt: its turns, its media in the order of the turns, its tools, variables of the template, and the
    salt of caches; empty: none."""

    turns: tuple[Turn, ...]
    media: tuple[MediaRequest, ...]
    tools: tuple[Tool, ...] = ()
    template_options: Mapping[str, Any] = field(default_factory=dict)
    cache_salt: str = ""

    @property
    def urls(self) -> dict[str, str]:
        """The URLs to fetch, by the name of the media item."""
        return {item.name: item.location.url for item in self.media if isinstance(item.location, MediaUrl)}

    @property
    def is_quick(self) -> bool:
        """Whether planning takes at most a second and waits for no worker and no lock: no large text, and no media but
        embeddings of as few tokens and few slices."""
        text = sum(len(part) for turn in self.turns for part in turn.parts if not isinstance(part, Modality))
        said = [(turn.tool_calls, turn.thought) for turn in self.turns if turn.tool_calls or turn.thought]
        others = (self.tools, self.template_options, said)
        grids = [item.location.grid for item in self.media if isinstance(item.location, Embeds)]
        embeds = sum(grid.tokens + _SLICE_CHARS * grid.t for grid in grids)
        return len(grids) == len(self.media) and embeds + text + len(str(others)) <= LARGE_TEXT_CHARS

    def with_sources(self, sources: Mapping[str, Source]) -> Conversation:
        """The conversation with the sources of fetched and received files, by the name of the media item."""
        media = (replace(item, location=sources[item.name]) if item.name in sources else item for item in self.media)
        return replace(self, media=tuple(media))
