"""A live session's streams: their times, one after the other, and what is counted of sources."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from unittest.mock import AsyncMock, Mock

import pytest
from prometheus_client import REGISTRY

from gridsieve.services.generation.live.frames import MAX_LENGTH_S, Frames
from gridsieve.services.generation.live.source_metrics import Sources
from gridsieve.services.generation.live.streams import Streams, StreamState, StreamTimes
from gridsieve.services.generation.upstream.watch import WatchedFrame

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
        see = lambda frame, time_s: frames.pair(frame.picture, time_s)  # noqa: E731
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
