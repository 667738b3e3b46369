"""What a caller asks: turns of text, images and videos, and where the bytes or embeddings of each come from.

It knows nothing of protobuf (`wire`). Ranges are the services' to check; here only what no request can express
is refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Literal, TypeAlias
from urllib.parse import unquote

import numpy as np
from numpy.typing import NDArray

from common.contract.errors import InvalidRequest
from common.contract.plan import Grid
from common.contract.retention import Pruning

# Of what preprocessing reads as still pictures, but for .apng and .avifs, which move.
IMAGE_SUFFIXES = frozenset(
    {
        *(".avif", ".bmp", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"),
        *(".pbm", ".pfm", ".pgm", ".pnm", ".ppm"),
    }
)

_EMBEDS_DTYPES = ("float16", "bfloat16", "float32")
_SOURCES = ("path", "data", "server_path", "url", "embeds")
_URL = re.compile(r"https?://[^/?#]*(?P<path>[^?#]*)|data:(?P<type>[^;,]*)", re.IGNORECASE)
_SAMPLING = ("fps", "min_frames", "max_frames", "max_pixels", "start_s", "end_s")

Role: TypeAlias = Literal["system", "user", "assistant"]
StrPath: TypeAlias = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Text:
    """Plain text. What spells a control token stays text."""

    text: str


@dataclass(frozen=True, slots=True, eq=False)
class Embeds:
    """What a vision tower yields for a whole, unpruned image or video, in place of its pixels.

        rows = tower(frames)                                         # torch.float32 [8 · 12 · 16, D]
        Video(embeds=Embeds(rows.numpy(), Grid(8, 12, 16), seconds_per_slice=1.0))

        raw = rows.bfloat16().view(torch.uint8).numpy().tobytes()    # half the size
        Video(embeds=Embeds(raw, Grid(8, 12, 16), dtype="bfloat16", shape=rows.shape, seconds_per_slice=1.0))

    values: float16 or float32 [tokens, D] or, with deepstack, [1 + levels, tokens, D], level 0 being the embedding;
        tokens in the grid's order: slices, rows, columns. Or an array's bytes, little-endian and in C order.
    grid: its tokens after spatial merging; an image's t is 1.
    dtype, shape: of bytes, and only of them: "float16", "bfloat16" (which numpy lacks) or "float32".
    seconds_per_slice, timestamps_s: a video has exactly one of them, an image none: the time between temporal slices
        (seconds_per_grid in the contract; a float is read as its shortest decimal), or when each slice is shown.
    Raises InvalidRequest for values of another type or number of axes.
    """

    values: NDArray[np.float16] | NDArray[np.float32] | bytes = field(repr=False)
    grid: Grid
    _: KW_ONLY
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    seconds_per_slice: Fraction | float | None = None
    timestamps_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.values, (bytes, np.ndarray)):
            raise InvalidRequest(f"Embeds.values must be a numpy array or bytes, got {type(self.values).__name__}")
        for name in ("dtype", "shape"):
            if isinstance(self.values, bytes) != (getattr(self, name) is not None):
                raise InvalidRequest(f"Embeds.{name} must be set where values are bytes, and nowhere else")
        if self.array_dtype not in _EMBEDS_DTYPES:
            raise InvalidRequest(f"Embeds.values must be {', '.join(_EMBEDS_DTYPES)}, got {self.array_dtype}")
        if len(self.array_shape) not in (2, 3):
            raise InvalidRequest(
                f"Embeds.values must be [tokens, D] or [1 + levels, tokens, D], got {list(self.array_shape)}"
            )

    @property
    def array_dtype(self) -> str:
        """The name of the values' element type, however they are given."""
        return (self.dtype or "") if isinstance(self.values, bytes) else self.values.dtype.name

    @property
    def array_shape(self) -> tuple[int, ...]:
        """The values' shape, however they are given."""
        return (self.shape or ()) if isinstance(self.values, bytes) else self.values.shape


@dataclass(frozen=True, slots=True)
class Image:
    """A still picture, from exactly one of five sources.

    path: a file on this machine, sent with the request.
    data: the file's bytes, sent with the request.
    server_path: a path below preprocessing's --media-root; nothing is sent.
    url: http:// or https://, which preprocessing fetches where its settings allow it; or a data: URI, sent as it is.
    embeds: what the vision tower yields for it, sent with the request.
    max_pixels: at most this many pixels are looked at; None: the checkpoint's own. Not beside embeds.
    Raises InvalidRequest unless exactly one of the five is given.
    """

    path: StrPath | None = None
    _: KW_ONLY
    data: bytes | None = None
    server_path: str | None = None
    url: str | None = None
    embeds: Embeds | None = None
    max_pixels: int | None = None

    def __post_init__(self) -> None:
        _check_source(self)


@dataclass(frozen=True, slots=True)
class Video:
    """A moving picture, from exactly one of five sources, and which of its frames are looked at.

    path, data, server_path, url, embeds: as for Image.
    fps, min_frames, max_frames, max_pixels (a frame), start_s, end_s: None is the checkpoint's own, or the whole video.
        Not beside embeds, which have no frames.
    pruning: overrides the request's for this video.
    Raises InvalidRequest unless exactly one of path, data, server_path, url and embeds is given.
    """

    path: StrPath | None = None
    _: KW_ONLY
    data: bytes | None = None
    server_path: str | None = None
    url: str | None = None
    embeds: Embeds | None = None
    fps: float | None = None
    min_frames: int | None = None
    max_frames: int | None = None
    max_pixels: int | None = None
    start_s: float | None = None
    end_s: float | None = None
    pruning: Pruning | None = None

    def __post_init__(self) -> None:
        _check_source(self)


Part: TypeAlias = Text | Image | Video
PartLike: TypeAlias = Part | StrPath
"""What may stand before a question: a part, the path of a media file on this machine, or a URL."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation: who speaks, and text and media in the order in which the model reads them."""

    role: Role
    parts: tuple[Part, ...]


def media_of(location: StrPath) -> Image | Video:
    """A media file on this machine, or a URL: an image if its suffix or its data: type says so, else a video."""
    kind = Image if names_image(location) else Video
    return kind(url=str(location)) if is_url(location) else kind(location)


def is_url(location: StrPath) -> bool:
    """Whether it starts as a URL that services know, and not as a path."""
    return _URL.match(str(location)) is not None


def names_image(location: StrPath) -> bool:
    """Whether a path's or URL's suffix is an image's; of a data: URI, whether its type is."""
    url = _URL.match(str(location))
    if url is not None and url["type"] is not None:
        return url["type"].lower().startswith("image/")
    return Path(file_name(location)).suffix.lower() in IMAGE_SUFFIXES


def file_name(location: StrPath) -> str:
    """The last part of a path, or of a URL's without its query; "data:" of a data: URI."""
    url = _URL.match(str(location))
    if url is None:
        return Path(location).name
    return Path(unquote(url["path"])).name if url["type"] is None else "data:"


def user_turn(media: PartLike | Sequence[PartLike] | None, text: str) -> Message:
    """The caller's turn: media (and any text among it) first, then the question; an empty text adds nothing."""
    if media is None:
        media = ()
    elif isinstance(media, (Text, Image, Video, str, os.PathLike)):
        media = (media,)
    parts = [item if isinstance(item, Part) else media_of(item) for item in media]
    return Message("user", (*parts, Text(text)) if text else tuple(parts))


def _check_source(media: Image | Video) -> None:
    kind = type(media).__name__
    given = [name for name in _SOURCES if getattr(media, name) is not None]
    if len(given) != 1:
        raise InvalidRequest(
            f"{kind} needs exactly one of path, data, server_path, url and embeds, got {', '.join(given) or 'none'}"
        )
    useless = [name for name in _SAMPLING if getattr(media, name, None) is not None]
    if media.embeds is not None and useless:
        raise InvalidRequest(f"{kind}.{useless[0]} must not be set beside embeds, which have no frames")
