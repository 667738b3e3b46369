"""Small real media files, and mutations of them: truncated, bits flipped, overwritten, repeated, random."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from functools import cache

from PIL import Image

from tests.preprocessing.preprocessing_media import clip, picture_of

VIDEOS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("mp4", "libx264", {"g": "4", "bf": "2"}),
    ("matroska", "libx264", {"g": "4"}),
    ("mpegts", "libx264", {"g": "4"}),
    ("avi", "mpeg4", {"g": "4"}),
    ("flv", "flv", {"g": "4"}),
    ("webm", "libvpx-vp9", {"g": "4"}),
    ("mp4", "libx265", {"x265-params": "log-level=none:keyint=4"}),
    ("mov", "mjpeg", {}),
    ("gif", "gif", {}),
)
# Without it Matroska contains a random number.
EXACT = {"fflags": "+bitexact"}
PICTURES = ("PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP", "PPM", "AVIF")


@cache  # encoders are not deterministic between runs
def originals() -> list[tuple[str, bytes]]:
    """Name and bytes of each file. Names start with "video" or "picture"."""
    found = []
    for container, codec, options in VIDEOS:
        pixels = "rgb8" if codec == "gif" else None
        data = clip(10, 25, container, codec, options, pixel_format=pixels, container_options=EXACT)
        found.append((f"video {container} {codec}", data))
    turned = clip(10, 25, prepare=lambda stream: stream.set_display_rotation(90))
    found.append(("video mp4 turned", turned))
    for name in PICTURES:
        file = io.BytesIO()
        Image.fromarray(picture_of(77)).save(file, name)
        found.append((f"picture {name}", file.getvalue()))
    return found


def mutations(seed: int, count: int) -> Iterator[tuple[str, bytes]]:
    """Name and bytes of `count` mutations, of every file in turn; the same for the same seed."""
    random_ = random.Random(seed)
    files = originals()
    for number in range(count):
        name, data = files[number % len(files)]
        yield f"{name} {number}", _mutated(bytearray(data), random_)


def _mutated(data: bytearray, random_: random.Random) -> bytes:
    how = random_.randrange(6)
    start = random_.randrange(len(data))
    end = min(len(data), start + random_.randrange(1, 64))
    if how == 0:
        return bytes(data[:start])
    if how == 1:
        for _ in range(random_.randrange(1, 40)):
            data[random_.randrange(len(data))] ^= 1 << random_.randrange(8)
    elif how == 2:  # headers, on which most decisions depend
        for _ in range(random_.randrange(1, 12)):
            data[random_.randrange(min(1024, len(data)))] = random_.choice((0, 1, 127, 128, 255))
    elif how == 3:
        data[start:end] = random_.randbytes(end - start)
    elif how == 4:
        data[start:start] = data[random_.randrange(len(data)) :][: random_.randrange(1, 2048)]
    else:
        data = data[:4] + random_.randbytes(random_.randrange(1, 4096))
    return bytes(data)
