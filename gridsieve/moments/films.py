"""The films of a folder, and the parts of a film that become moments: its shots, or windows of one length.

    shots      |           |     |                  |        of every keyframe, where `--mode shots` compares 1024
    windows    |        |        |        |         |        the length is divided evenly

Preprocessing's `video` reads packets, finds shots and decodes. It knows neither vectors nor stores.
"""

from __future__ import annotations

import bisect
import hashlib
import io
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
from PIL import Image

from gridsieve.common.contract.errors import MediaDamaged
from gridsieve.common.media_files import kind_of
from gridsieve.search.films import FilmFile, Span
from gridsieve.services.preprocessing.sources.source import Source
from gridsieve.services.preprocessing.video.packets import PacketIndex, read_packets
from gridsieve.services.preprocessing.video.shots import MAX_COMPARED, find_shots
from gridsieve.services.preprocessing.video.slices import PlannedVideo

# Keyframes to a part of a film in which shots are found.
COMPARED = MAX_COMPARED - 1
PICTURE_PX = 320  # wide
_QUALITY = 85


@dataclass(frozen=True, slots=True)
class CutSpan:
    """A part of a film that becomes a moment.

    has_keyframe: whether one of its frames is a keyframe. picture: a frame of it, JPEG of PICTURE_PX: of its keyframes
    the nearest to its middle, which costs least to decode, else the frame in the middle; empty: it cannot be decoded.
    """

    span: Span
    has_keyframe: bool
    picture: bytes


@dataclass(frozen=True, slots=True)
class CutFilm:
    """How long a film lasts, and its parts in order."""

    length_s: float
    spans: tuple[CutSpan, ...]


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
                found.append(_film_file(folder, path))
    return sorted(found, key=lambda each: each.path)


def named_films(folder: Path, paths: Iterable[str]) -> list[FilmFile]:
    """Those of these files that are there. paths: relative to the folder."""
    return [_film_file(folder, folder / each) for each in paths if (folder / each).is_file()]


def _film_file(folder: Path, path: Path) -> FilmFile:
    status = path.stat()
    return FilmFile(path.relative_to(folder).as_posix(), status.st_size, status.st_mtime_ns)


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
        shown_s = [_not_after(tick * time_base) for tick in ticks]
        keys = index.keyframe_places(0, len(ticks))
        spans = [Span(*each) for each in pairwise(times_s)]
        keyed = [_within(each, [shown_s[key] for key in keys]) for each in spans]
        middles = [
            _nearest([keys[number] for number in has] if has else range(len(ticks)), shown_s, each)
            for each, has in zip(spans, keyed, strict=True)
        ]
        pictures = _pictures(source, index, middles)
    cut = (CutSpan(each, bool(has), picture) for each, has, picture in zip(spans, keyed, pictures, strict=True))
    return CutFilm(times_s[-1], tuple(cut))


def _within(span: Span, times_s: Sequence[float]) -> range:
    """The numbers of the increasing times that a span has."""
    return range(bisect.bisect_left(times_s, span.start_s), bisect.bisect_left(times_s, span.end_s))


def _nearest(places: Sequence[int], times_s: Sequence[float], span: Span) -> int:
    """The place whose frame is shown nearest to the middle of a span. places: increasing."""
    middle_s = (span.start_s + span.end_s) / 2
    after = bisect.bisect_left(places, middle_s, key=lambda place: times_s[place])
    return min(places[max(0, after - 1) : after + 1], key=lambda place: abs(times_s[place] - middle_s))


def _pictures(source: Source, index: PacketIndex, places: Sequence[int]) -> list[bytes]:
    """The frames at these places, which do not decrease, as JPEG; empty ones where too much cannot be decoded."""
    height_px = max(1, round(PICTURE_PX * index.height_px / index.width_px))
    video = PlannedVideo(source, index, tuple(places), slice_frames=1, size_px=(height_px, PICTURE_PX))
    found = []
    with suppress(MediaDamaged):
        for frame in video.slices():
            file = io.BytesIO()
            Image.fromarray(frame.pixels[0].astype(np.uint8)).save(file, "JPEG", quality=_QUALITY)
            found.append(file.getvalue())
    return found + [b""] * (len(places) - len(found))


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


def _not_after(time_s: Fraction) -> float:
    """The float next to a time whose shortest decimal, which is how services read it, is not later."""
    near = float(time_s)
    return near if Fraction(str(near)) <= time_s else math.nextafter(near, 0)


@contextmanager
def _opened(path: Path) -> Iterator[Source]:
    with path.open("rb", buffering=0) as file:
        yield Source(repr(path.name), b"", file.fileno())  # quoted, so that errors do not take it for a field
