"""Recordings whose clock starts again, leaps or wraps: every frame is found, in the order of the file, at its time."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import av
import pytest

from gridsieve.services.preprocessing.sources.source import bytes_source
from gridsieve.services.preprocessing.video.decode import decode_frames
from gridsieve.services.preprocessing.video.packets import read_packets
from tests.preprocessing.preprocessing_media import B_FRAMES, clip, number_of, restamped, shifted

RATE = 25
CLOCK_S = Fraction(2**33, 90_000)  # of a transport stream, whose times have 33 bits


def assert_shows(data: bytes, numbers: list[int], dropped: int = 0) -> None:
    """Frame i of `data` shows numbers[i] at i / RATE seconds, whatever frames are selected beside it."""
    source = bytes_source("video", data)
    index = read_packets(source)
    assert index.dropped_frames == dropped
    times = [tick * index.times.time_base for tick in index.times.ticks]
    assert times == [Fraction(place, RATE) for place in range(len(numbers))]
    for step in (1, 2, 9, 26):
        places = range(0, len(numbers), step)
        frames = list(decode_frames(source, index, places))
        assert [number_of(frame.pixels) for frame in frames] == [numbers[place] for place in places]
        assert not any(frame.repaired for frame in frames)


@pytest.mark.parametrize(
    ("container", "codec", "options"),
    [
        ("mpegts", "libx264", B_FRAMES),
        ("mpegts", "libx264", {"g": "12", "x264-params": "open-gop=1:bframes=3:b-adapt=0:scenecut=0"}),
        ("mpegts", "libx265", {"x265-params": "log-level=none:keyint=12:min-keyint=12:bframes=3"}),
        ("mpegts", "mpeg2video", {"g": "12", "bf": "2"}),
        ("mpeg", "mpeg2video", {"g": "12", "bf": "2"}),
    ],
)
def test_joined_recordings_follow_one_another(container: str, codec: str, options: dict[str, str]) -> None:
    lengths = (50, 7, 30)
    data = b"".join(clip(frames, RATE, container, codec, options) for frames in lengths)
    assert_shows(data, [number for frames in lengths for number in range(frames)])


def test_a_clock_that_leaps_ahead_leaves_no_gap() -> None:
    first = clip(50, RATE, "mpegts", options=B_FRAMES)
    assert_shows(first + shifted(first, "mpegts", Fraction(500)), [*range(50), *range(50)])


def test_a_clock_that_wraps_goes_on() -> None:
    whole = clip(75, RATE, "mpegts", options=B_FRAMES)
    assert_shows(shifted(whole, "mpegts", CLOCK_S - 2), list(range(75)))


STRAY = (5, 18, 33, 50, 66)
HOUR_S = 3600


@pytest.mark.parametrize(
    "change",
    [
        lambda number: (HOUR_S, HOUR_S) if number in STRAY else (0, 0),
        lambda number: (-60, -60) if number in STRAY else (0, 0),
        lambda number: (0, HOUR_S) if number in STRAY else (0, 0),  # those of decoding alone
        lambda number: (HOUR_S, HOUR_S) if number % 12 == 0 else (0, 0),  # of each keyframe
        lambda number: (HOUR_S, HOUR_S) if number >= 30 else (0, 0),  # between two keyframes, and for good
        lambda number: (-50, -50) if number >= 30 else (0, 0),
        lambda number: (HOUR_S * ((number > 26) + (number > 32)),) * 2,  # no keyframe between two leaps
        lambda number: (HOUR_S, HOUR_S) if 26 < number < 57 else (0, 0),  # and back
    ],
)
def test_a_clock_that_leaps_between_keyframes_loses_no_frame(change: Callable[[int], tuple[int, int]]) -> None:
    whole = shifted(clip(80, RATE, "mpegts", options=B_FRAMES), "mpegts", Fraction(100))
    assert_shows(restamped(whole, change), list(range(80)))


def test_frames_whose_presentation_time_alone_is_wrong_are_dropped() -> None:
    whole = shifted(clip(80, RATE, "mpegts", options=B_FRAMES), "mpegts", Fraction(100))
    source = bytes_source("video", restamped(whole, lambda number: (HOUR_S * (number in STRAY), 0)))
    index = read_packets(source)
    numbers = [number_of(frame.pixels) for frame in decode_frames(source, index, range(75))]
    assert [tick * index.times.time_base * RATE for tick in index.times.ticks] == numbers
    assert (len(set(numbers)), index.dropped_frames) == (75, 5)


def test_a_recording_that_is_joined_between_keyframes_begins_with_its_first_one() -> None:
    """A broadcast capture begins anywhere. What refers to frames before it cannot be decoded."""
    whole = clip(50, RATE, "mpegts", options=B_FRAMES)
    cut = whole[len(whole) // 3 // 188 * 188 :]
    assert_shows(whole + cut, [*range(50), *range(24, 50)], dropped=10)


def test_frames_with_the_time_of_another_are_counted() -> None:
    times = [0, 40, 40, 80, 120, 120]
    with tempfile.NamedTemporaryFile() as file:
        with (
            av.open(io.BytesIO(clip(len(times), RATE, "matroska", "mjpeg"))) as original,
            av.open(file.name, "w", format="matroska") as output,
        ):
            stream = output.add_stream_from_template(original.streams.video[0])
            packets = [packet for packet in original.demux(video=0) if packet.size]
            for packet, time in zip(packets, times, strict=True):
                packet.pts = packet.dts = time
                packet.stream = stream
                output.mux(packet)
        twice = Path(file.name).read_bytes()
    index = read_packets(bytes_source("video", twice))
    assert (index.times.ticks.tolist(), index.dropped_frames) == ([0, 40, 80, 120], 2)
