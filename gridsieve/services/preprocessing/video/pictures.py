"""Still pictures, alone or as the frames of a video: reads the size from the header, and decodes the pixels.

Source: `load_image` and `convert_to_rgb` of transformers: upright by EXIF, transparency on white, RGB.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import BinaryIO

import numpy as np
from PIL import (  # Pillow imports a format's reader with its first picture, when a worker may read no more packages
    AvifImagePlugin,
    BmpImagePlugin,
    ExifTags,
    GifImagePlugin,
    Image,
    JpegImagePlugin,
    PngImagePlugin,
    PpmImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)

from gridsieve.common.contract.errors import InvalidRequest, MediaDamaged, MediaRejected
from gridsieve.services.preprocessing.sources.source import Source
from gridsieve.services.preprocessing.video.orientation import ON_ITS_SIDE, UPRIGHT, upright
from gridsieve.services.preprocessing.video.packets import MAX_FRAME_PX, check_frame_size
from gridsieve.services.preprocessing.video.resize import UInt8Array
from gridsieve.services.preprocessing.video.sampling import MAX_FRAMES, TICKS_PER_S
from gridsieve.services.preprocessing.video.timing import MAX_LENGTH_S
from gridsieve.services.preprocessing.video.unread_formats import unread_format

# Formats whose readers run no other program and reach no other file.
_READERS = (
    AvifImagePlugin.AvifImageFile,
    BmpImagePlugin.BmpImageFile,
    GifImagePlugin.GifImageFile,
    JpegImagePlugin.JpegImageFile,
    PngImagePlugin.PngImageFile,
    PpmImagePlugin.PpmImageFile,
    TiffImagePlugin.TiffImageFile,
    WebPImagePlugin.WebPImageFile,
)
_FORMATS = tuple(reader.format for reader in _READERS)
# How files of these formats begin, and of HEIC, which is refused by name.
_BEGINS = re.compile(
    rb"\x89PNG\r\n\x1a\n|\xff\xd8\xff|GIF8[79]a|BM|II[*+]\0|MM\0[*+]|P[0-7fFy]|RIFF....WEBP"
    rb"|....ftyp(?:avi[fs]|mif1|msf1|hei[cxms])",
    re.DOTALL,
)
# Of these, the formats that may hold an animation. The pages of a TIFF are none.
_ANIMATED = ("AVIF", "GIF", "PNG", "WEBP")
# Between the frames of a raw MJPEG stream.
_JPEG_AFTER_JPEG = b"\xff\xd9\xff\xd8\xff"
_JPEG_BYTES = 2**26
# The exceptions of Pillow's readers for damaged files, as found by fuzzing.
_UNREADABLE = (OSError, ValueError, SyntaxError, EOFError, RuntimeError, Image.DecompressionBombError)


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture's size once upright, and its EXIF orientation. moves: whether others follow it, in an animation."""

    height_px: int
    width_px: int
    orientation: int
    moves: bool = False


@dataclass(frozen=True, slots=True)
class PictureFrames:
    """The frames of a video that are pictures, all in one file.

    ends: where each picture ends in the file, in bytes. timestamps_s: when each is shown. by_time: positions of slices
    follow their own times. left_out: the first ones, which are empty and cannot be decoded.
    Raises InvalidRequest for another empty picture, too many, or times that are out of range or not increasing.
    """

    ends: tuple[int, ...]
    timestamps_s: tuple[float, ...]
    by_time: bool = False
    left_out: int = 0

    def __post_init__(self) -> None:
        if not self.left_out < len(self.ends) <= MAX_FRAMES:
            limit = f"1 to {MAX_FRAMES - self.left_out} pictures"
            raise InvalidRequest(field="frames.pictures", limit=limit, value=len(self.ends) - self.left_out)
        for number, (begin, end) in enumerate(pairwise((0, *self.ends))):
            if end <= begin and number >= self.left_out:
                field = f"frames.pictures[{number}]"
                raise InvalidRequest(f"must hold at least 1 byte, got {end - begin}", field=field)
        if len(self.timestamps_s) != len(self.ends):
            limit = f"as many times as pictures, {len(self.ends)}"
            raise InvalidRequest(field="frames.timestamps_s", limit=limit, value=len(self.timestamps_s))
        limit = f"from 0 to {MAX_LENGTH_S}"
        for number, time_s in enumerate(self.timestamps_s):
            if not (math.isfinite(time_s) and 0 <= time_s <= MAX_LENGTH_S):
                raise InvalidRequest(field=f"frames.timestamps_s[{number}]", limit=limit, value=time_s)
        ticks = [round(time_s * TICKS_PER_S) for time_s in self.timestamps_s]
        for number, (before, after) in enumerate(pairwise(ticks), 1):
            if after <= before:
                limit = f"at least a microsecond after the time before it, {self.timestamps_s[number - 1]}"
                field, value = f"frames.timestamps_s[{number}]", self.timestamps_s[number]
                raise InvalidRequest(field=field, limit=limit, value=value)


@dataclass(frozen=True, slots=True)
class PictureIndex:
    """The headers of a video's pictures: the size that all have once upright, and the orientation of each.

    ends: as in PictureFrames; empty: the whole file is one picture. An empty picture is upright. moves: whether others
        follow the one picture, in an animation.
    """

    ends: tuple[int, ...]
    orientations: tuple[int, ...]
    height_px: int
    width_px: int
    moves: bool = False


def read_pictures(source: Source, ends: Sequence[int], progress: Callable[[], None] = lambda: None) -> PictureIndex:
    """Sizes and orientations from the headers of pictures that follow one another in a file. Empty ones have none.

    ends: as in PictureIndex. progress: called for each picture.
    Raises MediaRejected as `read_picture`, and for a picture of another size than the first.
    """
    found: list[Picture] = []
    left_out = bisect_right(ends, 0)
    for part in islice(_parts(source, ends), left_out, None):
        found.append(read_picture(part))
        sizes = [f"{each.width_px}×{each.height_px}" for each in (found[0], found[-1])]
        if sizes[0] != sizes[1]:
            text = f"has {sizes[1]} pixels, the first picture has {sizes[0]}; all must have the same size"
            raise MediaRejected(text, field=part.name, value=sizes[1], limit=sizes[0])
        progress()
    orientations = (UPRIGHT,) * left_out + tuple(each.orientation for each in found)
    moves = found[0].moves and not ends
    return PictureIndex(tuple(ends), orientations, found[0].height_px, found[0].width_px, moves)


def decode_pictures(
    source: Source, index: PictureIndex, places: Sequence[int], progress: Callable[[], None] = lambda: None
) -> Generator[UInt8Array, None, None]:
    """Yields the pixels for each of `places`, which must not decrease, as `decode_picture`.

    progress: called for each picture that is decoded.
    """
    parts = list(_parts(source, index.ends))
    last_place, pixels = -1, np.empty((0, 0, 3), np.uint8)
    for place in places:
        if place != last_place:
            picture = Picture(index.height_px, index.width_px, index.orientations[place])
            last_place, pixels = place, decode_picture(parts[place], picture)
            progress()
        yield pixels


def _parts(source: Source, ends: Sequence[int]) -> Iterator[Source]:
    if not ends:
        yield source
    for number, (begin, end) in enumerate(pairwise((0, *ends))):
        yield source.part(f"{source.name}.frames.pictures[{number}]", begin, end)


def is_picture(head: bytes) -> bool:
    """Whether a file that begins so is a picture or an animation, which only `read_picture` tells apart."""
    return _BEGINS.match(head) is not None


def read_picture(source: Source) -> Picture:
    """Size and orientation from the header. Raises MediaRejected for an unreadable file or too many pixels."""
    with source.open() as file:
        try:
            with Image.open(file, formats=_FORMATS) as image:
                width, height = image.size
                moves = _moves(image, file)
                orientation = _orientation(image)
        except Image.DecompressionBombError as error:
            text = f"has far more pixels than the {MAX_FRAME_PX} that are allowed"
            raise MediaRejected(text, field=source.name) from error
        except _UNREADABLE as error:
            unread = unread_format(file)
            text = f"is {unread}" if unread else "cannot be read as an image"
            raise MediaRejected(text, field=source.name) from error
    check_frame_size(source.name, height, width)
    if orientation in ON_ITS_SIDE:
        height, width = width, height
    return Picture(height, width, orientation, moves)


def decode_picture(source: Source, picture: Picture) -> UInt8Array:
    """The pixels, uint8 [height_px, width_px, 3], RGB. Raises MediaDamaged if they cannot be decoded."""
    with source.open() as file:
        try:
            with Image.open(file, formats=_FORMATS) as image:
                rgb = _on_white(image)
        except _UNREADABLE as error:
            raise MediaDamaged(f"cannot be decoded: {error}", field=source.name) from error
    return upright(np.asarray(rgb), picture.orientation)


def _moves(image: Image.Image, file: BinaryIO) -> bool:
    """Whether several pictures follow one another. file: where the image's reader left it. A phone's photo that
    brings further pictures is MPO to Pillow, and still."""
    if image.format == "JPEG":
        return _JPEG_AFTER_JPEG in file.read(_JPEG_BYTES)
    return image.format in _ANIMATED and bool(getattr(image, "is_animated", False))


def _orientation(image: Image.Image) -> int:
    # Pillow decodes a PNG without EXIF when asked for it, and turns a TIFF upright itself.
    if image.format == "TIFF" or (image.format == "PNG" and "exif" not in image.info):
        return UPRIGHT
    orientation = image.getexif().get(ExifTags.Base.Orientation, UPRIGHT)
    return int(orientation) if orientation in range(UPRIGHT, 9) else UPRIGHT


def _on_white(image: Image.Image) -> Image.Image:
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        image.load()
        return image if image.mode == "RGB" else image.convert("RGB")  # which copies one that is RGB, too
    coloured = image.convert("RGBA")
    white = Image.new("RGBA", coloured.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, coloured).convert("RGB")
