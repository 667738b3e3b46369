"""Still pictures: reads the size from the header, and decodes the pixels.

Source: `load_image` and `convert_to_rgb` of transformers: upright by EXIF, transparency on white, RGB.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from PIL import ExifTags, Image

from common.contract.errors import MediaDamaged, MediaRejected
from services.preprocessing.sources.source import Source
from services.preprocessing.video.orientation import ON_ITS_SIDE, UPRIGHT, upright
from services.preprocessing.video.packets import MAX_FRAME_PX, check_frame_size
from services.preprocessing.video.resize import UInt8Array
from services.preprocessing.video.unread_formats import HEAD_BYTES, unread_format

# Formats whose readers run no other program and reach no other file.
_FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
# The exceptions of Pillow's readers for damaged files, as found by fuzzing.
_UNREADABLE = (OSError, ValueError, SyntaxError, EOFError, RuntimeError, Image.DecompressionBombError)


@dataclass(frozen=True, slots=True)
class Picture:
    """A still picture's size once upright, and its EXIF orientation."""

    height_px: int
    width_px: int
    orientation: int


def read_picture(source: Source) -> Picture:
    """Size and orientation from the header. Raises MediaRejected for an unreadable file or too many pixels."""
    with source.open() as file:
        try:
            with Image.open(file, formats=_FORMATS) as image:
                width, height = image.size
                orientation = _orientation(image)
        except Image.DecompressionBombError as error:
            raise MediaRejected(
                f"{source.name} has far more pixels than the {MAX_FRAME_PX} that are allowed"
            ) from error
        except _UNREADABLE as error:
            file.seek(0)
            unread = unread_format(file.read(HEAD_BYTES))
            raise MediaRejected(
                f"{source.name} {f'is {unread}' if unread else 'cannot be read as an image'}"
            ) from error
    check_frame_size(source.name, height, width)
    if orientation in ON_ITS_SIDE:
        height, width = width, height
    return Picture(height, width, orientation)


def decode_picture(source: Source, picture: Picture) -> UInt8Array:
    """The pixels, uint8 [height_px, width_px, 3], RGB. Raises MediaDamaged if they cannot be decoded."""
    with source.open() as file:
        try:
            with Image.open(file, formats=_FORMATS) as image:
                rgb = _on_white(image)
        except _UNREADABLE as error:
            raise MediaDamaged(f"{source.name} cannot be decoded: {error}") from error
    return upright(np.asarray(rgb), picture.orientation)


def _orientation(image: Image.Image) -> int:
    # Pillow decodes a PNG without EXIF when asked for it, and turns a TIFF upright itself.
    if image.format == "TIFF" or (image.format == "PNG" and "exif" not in image.info):
        return UPRIGHT
    return int(image.getexif().get(ExifTags.Base.Orientation, UPRIGHT))


def _on_white(image: Image.Image) -> Image.Image:
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    coloured = image.convert("RGBA")
    white = Image.new("RGBA", coloured.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, coloured).convert("RGB")
