"""A long video is indexed in little time and memory, and decoded only around its selected frames."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from av.video.frame import VideoFrame

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.services.preprocessing.planner import Planner
from gridsieve.services.preprocessing.video import decode
from gridsieve.services.preprocessing.video.packets import read_packets
from gridsieve.services.preprocessing.video.slices import PlannedVideo, Slice
from gridsieve.services.preprocessing.workers.job_queue import JobQueue
from gridsieve.services.preprocessing.workers.jobs import IndexVideo, VideoSlices
from gridsieve.services.preprocessing.workers.limits import Limits
from tests.awake import awake
from tests.preprocessing.planning import planned as planned_of
from tests.preprocessing.planning import video
from tests.preprocessing.preprocessing_media import HEIGHT_PX, WIDTH_PX, clip, number_of, transformers_indices
from tests.preprocessing.worker_jobs import MIB, read

pytestmark = pytest.mark.asyncio(loop_scope="module")
RATE, GROUP, LENGTH_S = 24, 48, 900
FRAMES = RATE * LENGTH_S
LIMITS = Limits(stall_s=20, frame_s=1, memory_bytes=192 * MIB, file_bytes=64 * MIB, frames=FRAMES, length_s=LENGTH_S)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a quarter of an hour of video that repeats two seconds: frame n shows n modulo 48."""
    made = tmp_path_factory.mktemp("long")
    group = clip(GROUP, RATE, options={"g": str(GROUP), "preset": "ultrafast"})
    with av.open(io.BytesIO(group)) as original, av.open(str(made / "long.mp4"), "w") as output:
        video = original.streams.video[0]
        stream = output.add_stream_from_template(video)
        packets = [packet for packet in original.demux(video) if packet.size]
        times = [packet.pts for packet in packets]
        ticks = int(Fraction(GROUP, RATE) / packets[0].time_base)
        for start in range(0, FRAMES // GROUP * ticks, ticks):
            for packet, pts in zip(packets, times, strict=True):
                packet.pts = packet.dts = start + pts
                packet.stream = stream
                output.mux(packet)
    return made


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with every frame that is decoded, selected or not."""
    frames: list[int] = []
    frames_of = decode._Frames._frames_of

    def counted(*arguments: Any) -> Iterator[tuple[int, VideoFrame]]:
        for key, frame in frames_of(*arguments):
            frames.append(key)
            yield key, frame

    monkeypatch.setattr(decode._Frames, "_frames_of", counted)
    return frames


@pytest.fixture
def planned(tiny_checkpoint: Path, folder: Path) -> Iterator[Callable[..., PlannedVideo]]:
    """Plans the video with these settings, to be sent at its own size."""
    with ExitStack() as files:

        def plan(**wish: Any) -> PlannedVideo:
            prompt = planned_of(Planner(Checkpoint(tiny_checkpoint), folder), video("long.mp4", **wish))
            files.enter_context(prompt.files)
            (made,) = prompt.media
            assert isinstance(made, PlannedVideo)
            return replace(made, size_px=(HEIGHT_PX, WIDTH_PX))

        yield plan


def numbers_of(slices: Iterable[Slice]) -> list[int]:
    return [number_of(row) for each in slices for row in each.pixels]


async def test_its_packets_are_read_in_little_memory_and_time(
    queue: JobQueue, planned: Callable[..., PlannedVideo]
) -> None:
    source = planned().source
    with awake() as passed_s:
        index = await queue.call(IndexVideo(source))
        assert passed_s() < 10
    assert index == read_packets(source)
    assert (len(index.times.ticks), len(index.keyframes)) == (FRAMES, FRAMES // GROUP)
    assert index.times.length_s == LENGTH_S


async def test_frames_from_all_over_it_are_the_selected_ones(
    queue: JobQueue, planned: Callable[..., PlannedVideo], decoded: list[int]
) -> None:
    video = planned()
    assert list(video.places) == transformers_indices(FRAMES, RATE, 2.0, 4, 768)
    sent = numbers_of(await read(queue, VideoSlices(video)))
    assert sent == [place % GROUP for place in video.places]
    few = replace(video, places=video.places[:384:4])
    assert numbers_of(few.slices()) == sent[:384:4]
    # From the keyframe before each frame to the frame, and the frames that reordering and threads hold back.
    assert len(decoded) <= 96 * (GROUP + 8) < few.places[-1]


@pytest.mark.parametrize(("start_s", "end_s"), [(501.0, 511.0), (890.0, 900.0)])
async def test_ten_seconds_of_it_are_decoded_alone(
    planned: Callable[..., PlannedVideo], decoded: list[int], start_s: float, end_s: float
) -> None:
    video = planned(start_s=start_s, end_s=end_s)
    assert {start_s <= place / RATE < end_s for place in video.places} == {True}
    assert numbers_of(video.slices()) == [place % GROUP for place in video.places]
    times_s = np.array(decoded) * float(video.index.times.time_base)
    # FFmpeg always decodes the first frame, because it begins there.
    assert all(start_s - GROUP / RATE <= time_s <= end_s + 1 for time_s in times_s if time_s >= 1)
    assert len(decoded) <= 12 * RATE + 16
