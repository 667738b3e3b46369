"""What a caller asks: turns of text, images and videos, and where the bytes of each come from.

It knows nothing of protobuf (`client.wire`). Ranges are the services' to check; here only what no request can express
is refused.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from common.errors import InvalidRequest
from common.retention import Pruning

IMAGE_SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"})

Role: TypeAlias = Literal["system", "user", "assistant"]
StrPath: TypeAlias = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Text:
    """Plain text. What spells a control token stays text."""

    text: str


@dataclass(frozen=True, slots=True)
class Image:
    """A still picture, from exactly one of three places.

    path: a file on this machine, sent with the request.
    data: the file's bytes, sent with the request.
    server_path: a path below preprocessing's --media-root; nothing is sent.
    max_pixels: at most this many pixels are looked at; None: the checkpoint's own.
    Raises InvalidRequest unless exactly one of the three is given.
    """

    path: StrPath | None = None
    _: KW_ONLY
    data: bytes | None = None
    server_path: str | None = None
    max_pixels: int | None = None

    def __post_init__(self) -> None:
        _check_one_source(self)


@dataclass(frozen=True, slots=True)
class Video:
    """A moving picture, from exactly one of three places, and which of its frames are looked at.

    path, data, server_path: as for Image.
    fps, min_frames, max_frames, max_pixels (a frame), start_s, end_s: None is the checkpoint's own, or the whole video.
    pruning: overrides the request's for this video.
    Raises InvalidRequest unless exactly one of path, data and server_path is given.
    """

    path: StrPath | None = None
    _: KW_ONLY
    data: bytes | None = None
    server_path: str | None = None
    fps: float | None = None
    min_frames: int | None = None
    max_frames: int | None = None
    max_pixels: int | None = None
    start_s: float | None = None
    end_s: float | None = None
    pruning: Pruning | None = None

    def __post_init__(self) -> None:
        _check_one_source(self)


Part: TypeAlias = Text | Image | Video
PartLike: TypeAlias = Part | StrPath
"""What may stand before a question: a part, or the path of a media file on this machine."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation: who speaks, and text and media in the order in which the model reads them."""

    role: Role
    parts: tuple[Part, ...]


def media_file(path: StrPath) -> Image | Video:
    """A media file on this machine: an image if its suffix says so, else a video."""
    return Image(path) if Path(path).suffix.lower() in IMAGE_SUFFIXES else Video(path)


def user_turn(media: PartLike | Sequence[PartLike] | None, text: str) -> Message:
    """The caller's turn: media (and any text among it) first, then the question; an empty text adds nothing."""
    if media is None:
        media = ()
    elif isinstance(media, (Text, Image, Video, str, os.PathLike)):
        media = (media,)
    parts = [item if isinstance(item, Part) else media_file(item) for item in media]
    return Message("user", (*parts, Text(text)) if text else tuple(parts))


def _check_one_source(media: Image | Video) -> None:
    given = [name for name in ("path", "data", "server_path") if getattr(media, name) is not None]
    if len(given) != 1:
        raise InvalidRequest(
            f"{type(media).__name__} needs exactly one of path, data and server_path, got {', '.join(given) or 'none'}"
        )
