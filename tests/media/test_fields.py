"""H.264 that codes frames as pairs of fields: a frame is one frame, however its fields are packed."""

from __future__ import annotations

import io
import tempfile
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from gridsieve.services.preprocessing.sources.source import bytes_source
from gridsieve.services.preprocessing.video.decode import decode_frames
from gridsieve.services.preprocessing.video.packets import read_packets
from tests.media.h264_fields import access_units
from tests.preprocessing.preprocessing_media import number_of, picture_of

FRAMES, TICKS = 20, 3600


@pytest.fixture(scope="module")
def units() -> list[tuple[bytes, bytes]]:
    """Black is not 0, which I_PCM may not hold; the height must be a multiple of 32."""
    pictures = [np.pad(picture_of(number)[..., 0], ((0, 16), (0, 0)), "edge") for number in range(FRAMES)]
    return access_units([np.maximum(each, 16) for each in pictures])


def recorded(container: str, packets: list[list[bytes]]) -> bytes:
    """A file of a frame's packets at a time, 25 frames a second."""
    raw = b"".join(data for parts in packets for data in parts)
    with tempfile.NamedTemporaryFile() as file:
        with av.open(io.BytesIO(raw), format="h264") as original, av.open(file.name, "w", format=container) as output:
            stream = output.add_stream_from_template(original.streams.video[0])
            for number, parts in enumerate(packets):
                for half, data in enumerate(parts):
                    packet = av.Packet(data)
                    packet.time_base, packet.stream = Fraction(1, 90_000), stream
                    packet.pts = packet.dts = number * TICKS + half * TICKS // 2
                    packet.is_keyframe = half == 0
                    output.mux(packet)
        return Path(file.name).read_bytes()


@pytest.mark.parametrize("container", ["mpegts", "matroska"])
@pytest.mark.parametrize("joined", [True, False])
def test_a_pair_of_fields_is_one_frame(units: list[tuple[bytes, bytes]], container: str, joined: bool) -> None:
    data = recorded(container, [[first + second] if joined else [first, second] for first, second in units])
    expected = list(range(FRAMES))
    if container == "mpegts":  # a recording that was joined from two
        data, expected = 2 * data, 2 * expected
    source = bytes_source("video", data)
    index = read_packets(source)
    times = [tick * index.times.time_base for tick in index.times.ticks]
    assert times == [Fraction(place, 25) for place in range(len(expected))]
    assert index.dropped_frames == 0
    for places in (range(len(expected)), range(0, len(expected), 7)):
        frames = list(decode_frames(source, index, places))
        assert [number_of(frame.pixels) for frame in frames] == [expected[place] for place in places]
        assert not any(frame.repaired for frame in frames)


def test_a_raw_stream_of_fields_is_counted_in_frames(units: list[tuple[bytes, bytes]]) -> None:
    source = bytes_source("video", b"".join(first + second for first, second in units))
    index = read_packets(source)
    assert len(index.times.ticks) == FRAMES
    assert [number_of(frame.pixels) for frame in decode_frames(source, index, [0, 7, 19])] == [0, 7, 19]
