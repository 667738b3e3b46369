"""The films of a folder, and the parts of a film that become moments: its shots, or windows of one length.

    shots      |           |     |                  |        of every keyframe, where `--mode shots` compares 1024
    windows    |        |        |        |         |        the length is divided evenly

Preprocessing's `video` reads packets, finds shots and decodes. It knows neither vectors nor stores.
"""

from __future__ import annotations

import bisect
import hashlib
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gridsieve.common.media_files import kind_of
from gridsieve.services.preprocessing.sources.source import Source
from gridsieve.services.preprocessing.video.packets import PacketIndex, read_packets
from gridsieve.services.preprocessing.video.shots import MAX_COMPARED, find_shots
from gridsieve.services.preprocessing.video.slices import PlannedVideo

# Keyframes to a part of a film in which shots are found.
COMPARED = MAX_COMPARED - 1


@dataclass(frozen=True, slots=True)
class FilmFile:
    """A file of a folder. path: relative to the folder, with slashes. modified_ns: when it was changed last."""

    path: str
    size_bytes: int
    modified_ns: int


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a film: the frames that are first shown in [start_s, end_s), seconds from the film's first frame.

    Both are the time of a frame, a window's limit or the film's end, and never later than it by rounding.
    has_keyframe: whether one of its frames is a keyframe.
    """

    start_s: float
    end_s: float
    has_keyframe: bool


@dataclass(frozen=True, slots=True)
class CutFilm:
    """How long a film lasts, and its parts in order."""

    length_s: float
    spans: tuple[Span, ...]


def film_files(folder: Path) -> list[FilmFile]:
    """The files below a folder that have the suffix of a video, by path; hidden files and folders are left out.

    Raises OSError for a folder that cannot be read.
    """
    found = []
    os.scandir(folder).close()  # `walk` passes over a folder that it cannot read
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = Path(place, name)
            if kind_of(path) == "video" and not name.startswith(".") and path.is_file():
                status = path.stat()
                relative = path.relative_to(folder).as_posix()
                found.append(FilmFile(relative, status.st_size, status.st_mtime_ns))
    return sorted(found, key=lambda each: each.path)


def digest_of(path: Path) -> str:
    """The sha256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cut_film(path: Path, window_s: float | None) -> CutFilm:
    """The shots of a film or, with a window, parts of about so many seconds that all last equally long.

    Raises MediaRejected for what is no video, MediaDamaged for one of which too much cannot be decoded, OSError for a
    file that cannot be read.
    """
    with _opened(path) as source:
        index = read_packets(source)
        ticks, time_base, length_s = index.times.ticks, index.times.time_base, index.times.length_s
        if window_s is None:
            limits = [*(ticks[place] * time_base for place in _shots(source, index)), length_s]
        else:
            windows = max(1, round(length_s / Fraction(str(window_s))))
            limits = [length_s * number / windows for number in range(windows + 1)]
    times_s = list(map(_not_after, limits))
    keys_s = [_not_after(ticks[place] * time_base) for place in index.keyframe_places(0, len(ticks))]
    spans = (
        Span(start_s, end_s, bisect.bisect_left(keys_s, start_s) < bisect.bisect_left(keys_s, end_s))
        for start_s, end_s in pairwise(times_s)
    )
    return CutFilm(times_s[-1], tuple(spans))


def frame_at(path: Path, time_s: float, width_px: int) -> NDArray[np.uint8]:
    """The frame of a film that is shown at a time: uint8 [height, width_px, 3], RGB. Raises as `cut_film`."""
    with _opened(path) as source:
        index = read_packets(source)
        place = _place_at(index, time_s)
        height_px = max(1, round(width_px * index.height_px / index.width_px))
        video = PlannedVideo(source, index, (place,), slice_frames=1, size_px=(height_px, width_px))
        (frame,) = video.slices()
        pixels: NDArray[np.uint8] = frame.pixels[0].astype(np.uint8)
    return pixels


def _shots(source: Source, index: PacketIndex) -> list[int]:
    """The places of the first frames of shots, by parts in which `find_shots` compares every keyframe.

    Two parts have the keyframe between them in common: the first of them says whether a shot begins there.
    """
    frames = len(index.times.ticks)
    begins = [0, *index.keyframe_places(0, frames)[COMPARED::COMPARED]]
    found = [0]
    for begin, next_one in zip(begins, [*begins[1:], frames - 1], strict=True):
        found += find_shots(source, index, begin, next_one + 1)[1:]
    return found


def _place_at(index: PacketIndex, time_s: float) -> int:
    tick = math.floor(Fraction(str(time_s)) / index.times.time_base)
    return max(0, bisect.bisect_right(index.times.ticks, tick) - 1)


def _not_after(time_s: Fraction) -> float:
    """The float next to a time whose shortest decimal, which is how services read it, is not later."""
    near = float(time_s)
    return near if Fraction(str(near)) <= time_s else math.nextafter(near, 0)


@contextmanager
def _opened(path: Path) -> Iterator[Source]:
    with path.open("rb", buffering=0) as file:
        yield Source(repr(path.name), b"", file.fileno())  # quoted, so that errors do not take it for a field
