"""Which files are videos, images and sounds, by the endings of their names.

`mimetypes` knows what the machine's tables know, which is not the same everywhere: .mkv or .ts are often missing.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import Literal

VIDEO_SUFFIXES = frozenset(
    f".{name}"
    for name in [
        "3gp",
        "asf",
        "avi",
        "flv",
        "m2ts",
        "m4v",
        "mkv",
        "mov",
        "mp4",
        "mpeg",
        "mpg",
        "mts",
        "mxf",
        "ogv",
        "ts",
        "webm",
        "wmv",
    ]
)
IMAGE_SUFFIXES = frozenset(f".{name}" for name in ["avif", "bmp", "gif", "jpeg", "jpg", "png", "tif", "tiff", "webp"])
SOUND_SUFFIXES = frozenset(
    f".{name}"
    for name in [
        "aac",
        "ac3",
        "aif",
        "aiff",
        "amr",
        "flac",
        "m4a",
        "mka",
        "mp3",
        "oga",
        "ogg",
        "opus",
        "wav",
        "weba",
        "wma",
    ]
)


def is_sound(path: PurePath) -> bool:
    """Whether a file is a sound by its name."""
    return path.suffix.lower() in SOUND_SUFFIXES


def kind_of(path: PurePath) -> Literal["video", "image"] | None:
    """What a file is by its name; None: neither."""
    suffix = path.suffix.lower()
    return "video" if suffix in VIDEO_SUFFIXES else "image" if suffix in IMAGE_SUFFIXES else None
