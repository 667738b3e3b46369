"""Parts of a live session: its frames, its turn, and its streams."""

from __future__ import annotations

import asyncio
import io
import math
from collections.abc import AsyncIterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock, Mock

import numpy as np
import pytest
from PIL import Image
from prometheus_client import REGISTRY

from gridsieve.common.contract.errors import InvalidRequest, MediaRejected
from gridsieve.common.contract.plan import Grid
from gridsieve.common.contract.retention import ItemPruning
from gridsieve.services.generation.live.ask import Ask, Trigger, pulled
from gridsieve.services.generation.live.frames import MAX_LENGTH_S, US_PER_S, Frame, FramePair, Frames, Waiting
from gridsieve.services.generation.live.pictures import snapshot_of
from gridsieve.services.generation.live.session_writer import SessionWriter
from gridsieve.services.generation.live.source_metrics import Sources
from gridsieve.services.generation.live.streams import Streams, StreamState, StreamTimes
from gridsieve.services.generation.live.turn import Turn
from gridsieve.services.generation.request.live_cuts import SliceSegment
from gridsieve.services.generation.request.session import Segment, Session
from gridsieve.services.generation.sampling.params import SamplingRequest
from gridsieve.services.generation.upstream.watch import WatchedFrame, ppm_header
from tests.tiny import BLOCK_TOKENS

# --- frames: which are used, how they are paired, and which wait ------------------------------------------------------


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


# --- the turn: what its next slice builds on, also where services fail ------------------------------------------------

ROWS = np.arange(4, dtype=np.int32)
SEGMENT = Segment(ROWS, np.tile(ROWS, (3, 1)), 4)
WHOLE = SliceSegment(SEGMENT, Grid(1, 2, 2), ROWS, np.zeros(3, np.int32))
CHANGED = replace(WHOLE, reference=b"last shown")
SETTLED = replace(CHANGED, settled=True)


def shown(time_s: int, stream: int = 0) -> FramePair:
    frames = [Frame(b"picture", time_s * US_PER_S + each, time_s) for each in (0, US_PER_S // 2)]
    return FramePair(*frames, stream=stream)


def turn_of(*cuts: SliceSegment) -> tuple[Turn, Session]:
    """A turn of which the first slice is whole."""
    session = Session("live", 64, 16, 16)
    turn = Turn(session)
    for number, cut in enumerate(cuts):
        turn.append(shown(number), cut, number, whole=not number)
    return turn, session


def test_a_slice_builds_on_the_one_before_it_until_the_whole_one_or_its_stream_is_gone() -> None:
    turn, session = turn_of(WHOLE, CHANGED)
    base = turn.base_of(shown(2))
    assert (base.shown, base.reference, base.is_gone) == (shown(1), b"last shown", False)
    assert turn.base_of(shown(2, stream=1)).is_gone
    session.first = 2  # segment 1 was evicted; segment 0 stays for ever
    base = turn.base_of(shown(2))
    assert (base.shown, base.reference, base.is_gone) == (shown(1), b"", True)
    turn.begin()
    assert turn.base_of(shown(2)).shown is None


@pytest.mark.parametrize(("cut", "is_gone"), [(WHOLE, True), (CHANGED, False)])
def test_without_pictures_a_slice_needs_the_reference(cut: SliceSegment, is_gone: bool) -> None:
    turn, _ = turn_of(WHOLE, cut)
    turn.give_up_pictures()
    base = turn.base_of(shown(2))
    assert base.is_gone == is_gone
    assert base.shown
    # Of a whole slice its predecessor has the times, and pictures of the same size.
    assert base.shown.size_bytes == (2 * len(b"picture") if is_gone else 0)
    assert base.shown.time_us == shown(1).time_us


def test_only_files_that_settled_keep_nothing() -> None:
    for cut, nothing in ((CHANGED, False), (SETTLED, True)):
        turn, _ = turn_of(WHOLE, cut)
        again = shown(2)
        assert turn.base_of(again).keeps_nothing_of(again) == nothing
        other = again.showing(b"another", b"picture")
        assert not turn.base_of(other).keeps_nothing_of(other)


async def test_a_slice_whose_decoder_fails_is_refused_and_the_session_keeps_what_it_has_seen() -> None:
    """Unlike one of another size, after which the session begins again."""
    failed = MediaRejected("cannot be decoded: its decoder crashed", field="prompt.messages[0].parts[0].video.frames")
    media = Mock(open=Mock(side_effect=[failed, nullcontext()]))
    session, responses = Session("live", 64, 16, BLOCK_TOKENS), AsyncMock()
    wanted = Mock(pruning=ItemPruning(threshold=0.05, method="pixel_change"), max_pixels=None, window_s=math.inf)
    writer = SessionWriter(wanted, session, responses, Mock(), media, Mock(), dict)
    writer._turn.append(shown(0), WHOLE, number=0, whole=True)
    with pytest.raises(MediaRejected, match="its decoder crashed"):
        await writer.write(shown(1))
    assert media.open.call_count == 1
    assert not responses.mock_calls


# --- streams: their times, one after the other, and what is counted of sources ----------------------------------------

# The first frames of intervals of 0.5 s, of a camera with 25 frames a second.
SAMPLED_S = (0.0, 0.52, 1.0, 1.52)


@pytest.mark.parametrize("lost_s", [0.0, 0.31, 7.25])
def test_the_frames_of_another_stream_go_on_by_the_time_that_passed_and_all_are_used(lost_s: float) -> None:
    now_s, frames = [100.0], Frames(2)
    times = StreamTimes(2, lambda: round(now_s[0] * 1e9))
    seen: list[float] = []
    for first_s in (5.0, 0.3):  # on the clock of each stream
        times.begin()
        for time_s in SAMPLED_S:
            now_s[0] += 0.5
            seen.append(times.of(first_s + time_s))
        now_s[0] += lost_s
    slices = 0
    for time_s in seen:
        slices += frames.pair(b"picture", time_s) is not None
    assert slices == len(SAMPLED_S)
    assert seen[:4] == pytest.approx([5 + time_s for time_s in SAMPLED_S])
    assert [time_s - seen[4] for time_s in seen[4:]] == pytest.approx(SAMPLED_S)
    assert 0.5 + lost_s <= seen[4] - seen[3] < 1.0 + lost_s


async def test_a_source_that_lasts_longer_than_a_session_may_ends_once() -> None:
    frames, told = Frames(2), list[tuple[StreamState, str]]()

    async def film() -> AsyncIterator[WatchedFrame]:
        for time_s in (3.0, 3.0 + MAX_LENGTH_S + 1):
            yield WatchedFrame(b"P6", time_s, 0)

    async def tell(state: StreamState, reason: str) -> None:
        told.append((state, reason))

    watch = Mock(open=AsyncMock(), events=film)
    media = Mock(watch=Mock(return_value=watch))
    async with asyncio.timeout(5), asyncio.TaskGroup() as group:  # which ends once the source is not watched any more

        def see(frame: Any, time_s: float) -> None:
            frames.pair(frame.picture, time_s)

        Streams(media, 2, dict, see, frames.end_stream, tell, group).watch("rtsp://camera.test/", True, Mock())
    assert [state for state, _ in told] == [StreamState.PLAYING, StreamState.ENDED]
    assert f"within {MAX_LENGTH_S} s of the first frame's, 3" in told[1][1]


def test_sources_of_one_name_are_up_if_all_are_and_leave_no_series_behind() -> None:
    def series() -> dict[str, float]:
        samples = [sample for metric in REGISTRY.collect() if "_source_" in metric.name for sample in metric.samples]
        return {sample.name: sample.value for sample in samples if sample.labels["source"] == "door"}

    sources, up = Sources(), "gridsieve_generation_source_up"
    with sources.watched("door") as first:
        first.plays()
        with sources.watched("door") as second:
            assert series()[up] == 0
            second.plays()
            assert series()[up] == 1
            first.ended()
            second.lost()
            assert series()[up] == 0
        assert up not in series()
        assert series()
    assert not series()
