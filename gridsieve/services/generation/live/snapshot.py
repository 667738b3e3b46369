"""The picture of a frame that goes with a live session's responses."""

from __future__ import annotations

import io

from PIL import Image

from gridsieve.services.generation.live.raw_frame import pixels_of

# A response holds no more than 8 MiB. The caller has the larger files that it sent.
MAX_FILE_BYTES = 4 * 2**20
_LONGEST_PX, _QUALITY = 1280, 85


def snapshot_of(picture: bytes | bytearray) -> bytes:
    """A picture file: of pixels a JPEG, scaled to at most 1280 pixels on the longer side; else the file as it came.

    Empty for a file of more than MAX_FILE_BYTES.
    """
    if (pixels := pixels_of(picture)) is None:
        return bytes(picture) if len(picture) <= MAX_FILE_BYTES else b""
    width, height, rgb = pixels
    image = Image.frombytes("RGB", (width, height), rgb)
    image.thumbnail((_LONGEST_PX, _LONGEST_PX))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=_QUALITY)
    return file.getvalue()
