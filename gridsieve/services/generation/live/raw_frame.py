"""Frames that come as pixels, as the picture files that preprocessing reads."""

from __future__ import annotations

import re
from collections.abc import Callable

from gridsieve.common.contract.errors import InvalidRequest
from gridsieve.common.contract.limits import MAX_RAW_PIXELS
from gridsieve.services.generation.upstream.watch import ppm_header

_HEADER = re.compile(rb"P6\n([1-9][0-9]{0,6}) ([1-9][0-9]{0,6})\n255\n")


def picture_of(width: int, height: int, read: Callable[[], bytes]) -> bytes:
    """The picture file of a frame of RGB pixels. read: returns the pixels, 3 bytes each.

    Raises InvalidRequest for pixels that are no picture.
    """
    for name, value in (("width", width), ("height", height)):
        if value < 1:
            raise InvalidRequest(field=f"frame.raw.{name}", limit="at least 1", value=value)
    size = f"{width}×{height} pixels"
    if width * height > MAX_RAW_PIXELS:
        raise InvalidRequest(f"has {size}, at most {MAX_RAW_PIXELS} are allowed", field="frame.raw")
    rgb = read()  # once: each time they are copied
    if len(rgb) != 3 * width * height:
        limit = f"{3 * width * height} bytes, 3 for each of {size}"
        raise InvalidRequest(field="frame.raw.rgb", limit=limit, value=f"{len(rgb)} bytes")
    return ppm_header(width, height) + rgb


def pixels_of(picture: bytes | bytearray) -> tuple[int, int, memoryview] | None:
    """Width, height and pixels of a file that begins with `ppm_header`; None for any other picture."""
    if (header := _HEADER.match(picture)) is None:
        return None
    width, height, rgb = int(header[1]), int(header[2]), memoryview(picture)[header.end() :]
    return (width, height, rgb) if len(rgb) == 3 * width * height <= 3 * MAX_RAW_PIXELS else None
