"""Videos are turned upright by their display matrix, and their upright size is known before decoding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from services.preprocessing.sources.source import bytes_source
from services.preprocessing.video.decode import decode_frames
from services.preprocessing.video.packets import PacketIndex, read_packets
from tests.preprocessing.preprocessing_media import clip, decoded_in_order

# a, b, c, d of the matrices of EXIF's eight orientations, in units of 2^-16.
MATRICES = {
    1: (1, 0, 0, 1),
    2: (-1, 0, 0, 1),
    3: (-1, 0, 0, -1),
    4: (1, 0, 0, -1),
    5: (0, 1, 1, 0),
    6: (0, 1, -1, 0),
    7: (0, -1, -1, 0),
    8: (0, -1, 1, 0),
}


def turned_clip(orientation: int, container: str = "mp4", **options: str) -> bytes:
    a, b, c, d = (each << 16 for each in MATRICES[orientation])

    def prepare(stream: Any) -> None:
        stream.set_display_matrix([a, b, 0, c, d, 0, 0, 0, 1 << 30])

    return clip(24, container=container, options={"g": "8"}, container_options=options, prepare=prepare)


def shown(pixels: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """Each pixel (x, y) at (a·x + c·y, b·x + d·y), moved back into view."""
    a, b, c, d = MATRICES[orientation]
    y, x = np.mgrid[: pixels.shape[0], : pixels.shape[1]]
    columns, rows = a * x + c * y, b * x + d * y
    columns, rows = columns - columns.min(), rows - rows.min()
    picture = np.zeros((rows.max() + 1, columns.max() + 1, 3), np.uint8)
    picture[rows, columns] = pixels
    return picture


def opened(data: bytes, places: list[int]) -> tuple[PacketIndex, list[NDArray[np.uint8]]]:
    source = bytes_source("video", data)
    index = read_packets(source)
    return index, [frame.pixels for frame in decode_frames(source, index, places)]


@pytest.mark.parametrize("container", ["mp4", "matroska"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_frames_are_turned_as_the_container_says(container: str, orientation: int) -> None:
    data = turned_clip(orientation, container)
    whole = decoded_in_order(data)
    index, frames = opened(data, [0, 5, 17])
    assert index.orientation == orientation
    assert (index.height_px, index.width_px) == ((64, 48) if orientation >= 5 else (48, 64))
    for frame, place in zip(frames, [0, 5, 17], strict=True):
        assert np.array_equal(frame, shown(whole[place], orientation))


def test_the_matrix_is_found_wherever_the_container_keeps_it() -> None:
    behind = turned_clip(6)
    assert behind.index(b"mdat") < behind.index(b"moov")
    in_front = turned_clip(6, movflags="faststart")
    assert in_front.index(b"moov") < in_front.index(b"mdat")
    # The muxer leaves eight bytes before `mdat` free for a 64-bit length.
    free = behind.index(b"free") - 4
    size = int.from_bytes(behind[free + 8 : free + 12]) + 8
    long = behind[:free] + (1).to_bytes(4) + b"mdat" + size.to_bytes(8) + behind[free + 16 :]
    assert [opened(data, [0])[0].orientation for data in (behind, in_front, long)] == [6, 6, 6]
