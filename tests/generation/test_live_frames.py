"""Frames of a live session: which are used, how they are paired, and which wait."""

from __future__ import annotations

import io
import math

import pytest
from PIL import Image

from gridsieve.common.contract.errors import InvalidRequest
from gridsieve.services.generation.live.ask import Ask, Trigger, pulled
from gridsieve.services.generation.live.frames import US_PER_S, FramePair, Frames, Waiting
from gridsieve.services.generation.live.pictures import snapshot_of
from gridsieve.services.generation.sampling.params import SamplingRequest
from gridsieve.services.generation.upstream.watch import ppm_header


def slices(fps: float, times_s: list[float]) -> list[tuple[float, float]]:
    """The times of the frames of each slice, as they came."""
    frames = Frames(fps)
    made = [frames.pair(b"picture", time_s) for time_s in times_s]
    return [(each.first.given_s, each.last.given_s) for each in made if each]


def test_the_first_frame_of_each_interval_is_used() -> None:
    assert slices(10, [round(0.1 * number, 1) for number in range(6)]) == [(0, 0.1), (0.2, 0.3), (0.4, 0.5)]
    assert slices(2, [7 + 0.1 * number for number in range(11)]) == [(7, 7.5)]
    assert slices(2, [0, 0.4, 3.3, 3.4, 3.5, 3.9, 4.0]) == [(0, 3.3), (3.5, 4.0)]


def test_a_lone_frame_is_shown_twice_before_a_question() -> None:
    frames = Frames(2)
    assert frames.pair(b"a", 5.0) is None
    lone = frames.flush()
    assert lone is not None
    assert (lone.first.picture, lone.last.picture, lone.used) == (b"a", b"a", 1)
    assert (lone.first.time_us, lone.last.time_us, lone.time_us) == (0, 1, 0)
    assert frames.flush() is None


@pytest.mark.parametrize("time_s", [math.nan, math.inf, 1.7e308, 4.9, 5 + 8 * 24 * 3600.0])
def test_frames_out_of_time_are_refused(time_s: float) -> None:
    frames = Frames(2)
    frames.pair(b"a", 5.0)
    with pytest.raises(InvalidRequest, match=r"frame\.time_s"):
        frames.pair(b"b", time_s)


def test_the_newest_slice_takes_the_place_of_one_that_waits() -> None:
    frames, dropped = Frames(2), list[FramePair]()
    made = [frames.pair(bytes([number]), number / 2) for number in range(8)]
    first, second, third, fourth = [each for each in made if each]
    waiting: Waiting[str] = Waiting(dropped.append)
    waiting.enqueue(first)
    waiting.enqueue(second)
    waiting.ask("what?", before=None)
    waiting.enqueue(third)
    waiting.enqueue(fourth)
    assert [waiting.take() for _ in range(len(waiting))] == [second, "what?", fourth]
    assert dropped == [first, third]


def test_slices_that_come_during_an_answer_wait_until_the_session_has_caught_up() -> None:
    frames, dropped = Frames(2), list[FramePair]()
    slices = [made for number in range(60) if (made := frames.pair(b"picture", number / 2))]
    waiting: Waiting[str] = Waiting(dropped.append)
    for each in slices[:3]:
        waiting.enqueue(each, answering=True)
    taken = list[FramePair | str]()
    for each in slices[3:5]:  # the session is faster than they come
        taken += [waiting.take(), waiting.take()]
        waiting.enqueue(each)
    assert taken == slices[:4]
    assert not dropped
    assert waiting.take() == slices[4]

    for each in slices[5:20]:
        waiting.enqueue(each, answering=True)
    assert dropped == slices[13:19]
    for each in slices[20:30]:  # it is as fast as they come
        waiting.take()
        waiting.enqueue(each)
    assert len(waiting) == 1
    assert waiting.take() == slices[29]


def test_slices_that_wait_have_bounded_bytes() -> None:
    """Before each of many questions two slices wait: the newest one, and one of a lone frame."""
    frames, dropped = Frames(2), list[FramePair]()
    waiting: Waiting[str] = Waiting(dropped.append)
    picture = bytes(5 << 20)
    for number in range(16):
        for half in range(3):
            if made := frames.pair(picture, (3 * number + half) / 2):
                waiting.enqueue(made)
        waiting.ask(f"{number}", frames.flush())
    waits = [waiting.take() for _ in range(len(waiting))]
    slices = [each for each in waits if isinstance(each, FramePair)]
    assert sum(each.size_bytes for each in slices) == 60 << 20
    assert [each.first.given_s for each in (*dropped, *slices)] == [1.5 * k + s for k in range(16) for s in (0, 1)]
    assert [each for each in waits if isinstance(each, str)] == [f"{number}" for number in range(16)]


def test_a_trigger_is_asked_at_each_of_its_beats() -> None:
    """Of a camera with 25 frames a second, whose slices end after 0.52, 1.52, 2.52, ... s: 4.52 - 2.52 is below 2."""
    trigger = Trigger(Ask("", ["What moves?"], SamplingRequest(), transient=False), every_us=2 * US_PER_S)
    frames, asked_at = Frames(2), list[int]()
    for number in range(1000):
        if made := frames.pair(b"picture", number / 25):
            asked_at += [number for _ in pulled([trigger], made.time_us, 0, (), 1)]
    ends = range(13, 1000, 25)
    assert asked_at == [number for number in ends if number >= 2 * 25][::2]


def test_a_snapshot_is_a_jpeg_of_pixels_or_the_file_that_came() -> None:
    with Image.open(io.BytesIO(snapshot_of(ppm_header(2560, 640) + bytes(3 * 2560 * 640)))) as shown:
        assert (shown.format, shown.size) == ("JPEG", (1280, 320))
    for file in (b"P6\n2 1\n255\nrgb", bytes(4 << 20)):
        assert snapshot_of(file) == file
    assert snapshot_of(bytes((4 << 20) + 1)) == b""
