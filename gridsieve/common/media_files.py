"""Which files are videos, images and sounds, by the endings of their names.

`mimetypes` knows what the machine's tables know, which is not the same everywhere: .mkv or .ts are often missing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
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


_SUFFIXES: Mapping[Literal["video", "image", "audio"], Collection[str]] = {
    "video": VIDEO_SUFFIXES,
    "image": IMAGE_SUFFIXES,
    "audio": SOUND_SUFFIXES,
}


def kind_of(path: PurePath) -> Literal["video", "image", "audio"] | None:
    """What a file is by its name; None: none of these."""
    suffix = path.suffix.lower()
    return next((kind for kind, suffixes in _SUFFIXES.items() if suffix in suffixes), None)
