"""Picture files of a live session's frames: made of pixels that come, and shown in responses."""

from __future__ import annotations

import io
import re
from collections.abc import Callable

from PIL import Image

from gridsieve.common.contract.errors import InvalidRequest
from gridsieve.common.contract.limits import MAX_RAW_PIXELS
from gridsieve.services.generation.upstream.watch import ppm_header

# A response holds no more than 8 MiB. The caller has the larger files that it sent.
MAX_SNAPSHOT_BYTES = 4 * 2**20
_LONGEST_PX, _QUALITY = 1280, 85
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


def snapshot_of(picture: bytes | bytearray) -> bytes:
    """A picture file: of pixels a JPEG, scaled to at most 1280 pixels on the longer side; else the file as it came.

    Empty for a file of more than MAX_SNAPSHOT_BYTES.
    """
    header = _HEADER.match(picture)
    width, height = (int(header[1]), int(header[2])) if header else (0, 0)
    rgb = memoryview(picture)[header.end() if header else 0 :]
    if not 0 < 3 * width * height == len(rgb) <= 3 * MAX_RAW_PIXELS:
        return bytes(picture) if len(picture) <= MAX_SNAPSHOT_BYTES else b""
    image = Image.frombytes("RGB", (width, height), rgb)
    image.thumbnail((_LONGEST_PX, _LONGEST_PX))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=_QUALITY)
    return file.getvalue()
