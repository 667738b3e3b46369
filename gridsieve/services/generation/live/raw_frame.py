"""Frames that come as pixels, as the picture files that preprocessing reads."""

from __future__ import annotations

import re

from gridsieve.common.contract.errors import InvalidRequest
from gridsieve.common.contract.limits import MAX_RAW_PIXELS
from gridsieve.services.generation.upstream.watch import ppm_header
from gridsieve.v1 import generation_pb2

_HEADER = re.compile(rb"P6\n([1-9][0-9]{0,6}) ([1-9][0-9]{0,6})\n255\n")


def picture_of(frame: generation_pb2.LiveFrame) -> bytes:
    """The picture file of a frame. Raises InvalidRequest for pixels that are no picture."""
    if not frame.HasField("raw"):
        return frame.picture
    raw = frame.raw
    for name, value in (("width", raw.width), ("height", raw.height)):
        if value < 1:
            raise InvalidRequest(field=f"frame.raw.{name}", limit="at least 1", value=value)
    size = f"{raw.width}×{raw.height} pixels"
    if raw.width * raw.height > MAX_RAW_PIXELS:
        raise InvalidRequest(f"has {size}, at most {MAX_RAW_PIXELS} are allowed", field="frame.raw")
    rgb = raw.rgb  # once: each time it is read it is copied
    if len(rgb) != 3 * raw.width * raw.height:
        limit = f"{3 * raw.width * raw.height} bytes, 3 for each of {size}"
        raise InvalidRequest(field="frame.raw.rgb", limit=limit, value=f"{len(rgb)} bytes")
    return ppm_header(raw.width, raw.height) + rgb


def pixels_of(picture: bytes | bytearray) -> tuple[int, int, memoryview] | None:
    """Width, height and pixels of a file that begins with `ppm_header`; None for any other picture."""
    if (header := _HEADER.match(picture)) is None:
        return None
    width, height, rgb = int(header[1]), int(header[2]), memoryview(picture)[header.end() :]
    return (width, height, rgb) if len(rgb) == 3 * width * height <= 3 * MAX_RAW_PIXELS else None
