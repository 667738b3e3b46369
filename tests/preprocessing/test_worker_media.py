"""Media come out of worker processes exactly as they come out in this process, within the limits of a job."""

from __future__ import annotations

import io
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from gridsieve.common.contract.errors import InvalidRequest, MediaDamaged, MediaRejected, PeerContract
from gridsieve.services.preprocessing.sources.source import Source, bytes_source
from gridsieve.services.preprocessing.video.packets import MAX_FRAME_PX, MAX_PACKETS, PacketIndex, read_packets
from gridsieve.services.preprocessing.video.pictures import decode_picture, read_picture, read_pictures
from gridsieve.services.preprocessing.video.resize import UInt8Array, View, resize_into
from gridsieve.services.preprocessing.video.slices import PlannedVideo, Slice
from gridsieve.services.preprocessing.workers.indexes import index_facts, index_of
from gridsieve.services.preprocessing.workers.job_queue import JobQueue
from gridsieve.services.preprocessing.workers.jobs import (
    IndexPictures,
    IndexVideo,
    Order,
    VideoSlices,
)
from gridsieve.services.preprocessing.workers.limits import Limits
from gridsieve.services.preprocessing.workers.process import Fault
from gridsieve.services.preprocessing.workers.protocol import Facts
from tests.fuzz.mutations import mutations
from tests.preprocessing.preprocessing_media import HEIGHT_PX, WIDTH_PX, clip, number_of, without_packets
from tests.preprocessing.worker_jobs import MIB, read

pytestmark = pytest.mark.asyncio(loop_scope="module")
LIMITS = Limits(stall_s=20, frame_s=1, memory_bytes=1024 * MIB, file_bytes=16 * MIB, frames=10_000, length_s=10_000)


def planned(source: Source, index: PacketIndex, places: tuple[int, ...]) -> PlannedVideo:
    return PlannedVideo(source, index, places, 2, (HEIGHT_PX, WIDTH_PX))


def numbers_of(slices: list[Slice]) -> list[int]:
    return [number_of(row) for each in slices for row in each.pixels]


def assert_equal(ours: list[Slice], theirs: list[Slice]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.first_frame, mine.repaired_frames) == (other.first_frame, other.repaired_frames)
        assert np.array_equal(mine.pixels, other.pixels)


@pytest.mark.parametrize(("container", "codec"), [("mp4", "libx264"), ("h264", "libx264"), ("avi", "libx264")])
async def test_a_video_comes_out_as_in_this_process(queue: JobQueue, container: str, codec: str) -> None:
    source = bytes_source("video", clip(40, container=container, codec=codec, options={"g": "12"}))
    index = await queue.call(IndexVideo(source))
    assert index == read_packets(source)
    video = planned(source, index, (0, 1, 7, 7, 13, 20, 31, 39))
    ours = await read(queue, VideoSlices(video))
    assert numbers_of(ours) == list(video.places)
    assert_equal(ours, list(video.slices()))


@pytest.mark.parametrize("format", ["AVIF", "JPEG"])
async def test_a_picture_comes_out_as_in_this_process(queue: JobQueue, format: str) -> None:
    file = io.BytesIO()
    noise = np.random.default_rng(1).integers(0, 255, (31, 45, 3), np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = {"exif": exif} if format == "JPEG" else {}
    Image.fromarray(noise).save(file, format, **turned)
    source = bytes_source("image", file.getvalue())
    header = await queue.call(IndexPictures(source, ()))
    assert header == read_pictures(source, ())
    assert (header.height_px, header.width_px) == ((45, 31) if turned else (31, 45))
    (ours,) = await read(queue, VideoSlices(PlannedVideo(source, header, (0,), 1, (56, 28))))
    resized = np.empty((56, 28, 3), np.uint8)
    resize_into(decode_picture(source, read_picture(source)), resized)
    assert np.array_equal(ours.pixels[0], resized)


@dataclass(frozen=True, slots=True)
class Watched(VideoSlices):
    """Notes after how many slices each worker began."""

    begun: list[int] = field(default_factory=list)

    def order(self, done: int) -> Order:
        self.begun.append(done)
        return VideoSlices.order(self, done)


async def interrupted_at(queue: JobQueue, slices_before: int, video: PlannedVideo) -> list[Slice]:
    """The slices of a video whose worker is lent to another job after so many slices."""
    queue.inflight.size_bytes = MIB
    job = Watched(video)
    async with queue.stream(job) as slices:
        made = [await anext(slices) for _ in range(slices_before)]
        await queue.call(IndexVideo(video.source))
        made += [each async for each in slices]
    assert job.begun == [0, slices_before]
    return made


@pytest.mark.parametrize("container", ["mp4", "avi"])
async def test_an_interrupted_video_continues_with_the_same_frames(queue: JobQueue, container: str) -> None:
    source = bytes_source("video", clip(48, container=container, options={"g": "12", "bf": "2"}))
    video = planned(source, read_packets(source), tuple(range(0, 48, 3)))
    ours = await interrupted_at(queue, 3, video)
    assert numbers_of(ours) == list(range(0, 48, 3))
    assert_equal(ours, list(video.slices()))


@pytest.mark.parametrize(("slices_before", "damaged"), [(4, []), (3, [6, 8]), (4, [8]), (4, [6, 8])])
async def test_an_interrupted_video_whose_frames_are_sliced_continues_with_the_same_slices(
    queue: JobQueue, slices_before: int, damaged: list[int]
) -> None:
    """Each frame is sent as a whole and two tiles; the interruption is before a frame or after its first slice."""
    source = bytes_source("video", without_packets(clip(60, container="matroska", codec="mjpeg"), damaged))
    views = (None, View(56, 84), View(56, 84, left=42))
    places = tuple(range(4, 60, 2))
    video = PlannedVideo(source, read_packets(source), places, 1, (28, 42), views, tile_px=(56, 42))
    whole = list(video.slices())
    assert [each.pixels.shape[1:3] for each in whole] == [(28, 42), (56, 42), (56, 42)] * len(places)
    assert sum(each.repaired_frames for each in whole) == len(damaged)
    assert_equal(await interrupted_at(queue, slices_before, video), whole)


# A slice shows frames 4n and 4n + 2: damage long after the interruption, right after it, on both sides, and too much.
@pytest.mark.parametrize(
    ("slices_before", "damaged"), [(12, [50, 54]), (5, [20, 22]), (5, [16, 18, 20]), (10, [4, 8, 44, 48])]
)
async def test_repairs_and_their_limit_count_over_the_whole_interrupted_video(
    queue: JobQueue, slices_before: int, damaged: list[int]
) -> None:
    source = bytes_source("video", without_packets(clip(60, container="matroska", codec="mjpeg"), damaged))
    video = planned(source, read_packets(source), tuple(range(0, 60, 2)))
    if len(damaged) > 3:
        with pytest.raises(MediaDamaged, match="4 of its 30 frames cannot be decoded, at most a tenth may be"):
            await interrupted_at(queue, slices_before, video)
    else:
        whole = list(video.slices())
        assert sum(each.repaired_frames for each in whole) == len(damaged)
        assert_equal(await interrupted_at(queue, slices_before, video), whole)


@pytest.mark.parametrize("count", [40, pytest.param(2000, marks=[pytest.mark.deep, pytest.mark.timeout(900)])])
async def test_mutated_files_end_no_worker_and_leak_nothing(queue: JobQueue, replaced: list[Fault], count: int) -> None:
    decoded = 0
    for name, data in mutations(4, count):
        source = bytes_source(name, data or b"\0")
        try:
            if name.startswith("picture"):
                header = await queue.call(IndexPictures(source, ()))
                video = PlannedVideo(source, header, (0,), 1, (28, 28))
            else:
                index = await queue.call(IndexVideo(source))
                places = tuple(range(min(len(index.times.ticks), 12) // 2 * 2))
                video = planned(source, index, places)
            decoded += len(await read(queue, VideoSlices(video)))
        except InvalidRequest:
            pass
        source.close()
    assert decoded > count / 2
    assert {*replaced} <= {Fault.MEMORY}  # some mutated headers ask for more memory than a worker may have
    replaced.clear()


async def test_media_beyond_a_limit_are_rejected_with_the_limit() -> None:
    def video(*arguments: Any, **options: Any) -> Source:
        return bytes_source("video", clip(*arguments, **options))

    limits = replace(LIMITS, file_bytes=2**20, frames=59, length_s=2)
    faults: list[Fault] = []
    async with JobQueue(1, limits, MIB, faults.append) as queue:
        for source, text in (
            (bytes_source("video", bytes(2**20 + 1)), "video has 1048577 bytes, at most 1048576 are allowed"),
            (video(60, 30), "video has 60 frames, at most 59 are allowed"),
            (video(30, 10), "video lasts 3 s, at most 2 are allowed"),
        ):
            with pytest.raises(MediaRejected, match=text):
                await queue.call(IndexVideo(source))
        assert len((await queue.call(IndexVideo(video(59, 30)))).times.ticks) == 59
    assert faults == []


async def test_a_lack_of_memory_is_not_reported_as_damage() -> None:
    """The H.264 decoder does not report failed allocations. It holds up to a dozen frames of 5.5 MB here."""
    reference = {"preset": "ultrafast", "g": "12", "x264-params": "ref=8:bframes=3:b-pyramid=normal"}
    source = bytes_source("video", clip(12, size=(1920, 1920), options=reference))
    video = planned(source, read_packets(source), tuple(range(12)))
    faults: list[Fault] = []
    async with JobQueue(1, replace(LIMITS, memory_bytes=80 * MIB), MIB, faults.append) as queue:
        with pytest.raises(MediaRejected, match="video cannot be decoded: it needed more than 80 MiB"):
            await read(queue, VideoSlices(video))
    assert faults == [Fault.MEMORY]


IMPOSSIBLE: list[dict[str, Any]] = [
    {"frames": 0}, {"frames": MAX_PACKETS + 1}, {"frames": 59}, {"frames": True}, {"frames": 60.0},
    {"by_order": 2}, {"tail_ticks": 0},
    {"time_base": []}, {"time_base": [1, 0]}, {"time_base": [1, 30, 1, 30]}, {"time_base": ["1", "30"]},
    {"time_base": [2**63, 1]}, {"time_base": [10**6, 1]},
    {"rates": [30]}, {"rates": [30, 1] * 4}, {"rates": "30"},
    {"height_px": 0}, {"height_px": MAX_FRAME_PX, "width_px": 2}, {"width_px": None},
]  # fmt: skip


async def test_an_impossible_index_breaks_the_contract() -> None:
    index = read_packets(bytes_source("video", clip(60, options={"g": "20"})))
    facts, numbers = index_facts(index)
    assert index_of(Facts(facts), numbers) == index
    for wrong in IMPOSSIBLE:
        with pytest.raises(PeerContract):
            index_of(Facts(facts | wrong), numbers)
    for place in (5, 61, 121):  # a presentation time, a size and a keyframe
        for value in (-(2**63), 2**63 - 1):
            changed = numbers.copy()
            changed[place] = value
            with pytest.raises(PeerContract):
                index_of(Facts(facts), changed)


async def test_an_impossible_slice_breaks_the_contract() -> None:
    job = VideoSlices(planned(bytes_source("video", b"media"), read_packets(bytes_source("video", clip(4))), (0, 1)))
    facts = {"repaired_frames": 0, "decode_s": 0.5, "resize_s": 0.25, "decoded_ns": 5, "resized_ns": 7}
    pixels: UInt8Array = np.zeros(2 * HEIGHT_PX * WIDTH_PX * 3, np.uint8)
    assert job.piece(0, Facts(facts), pixels, None).pixels.shape == (2, HEIGHT_PX, WIDTH_PX, 3)
    for wrong in ({"repaired_frames": 3}, {"repaired_frames": -1}, {"decode_s": float("nan")}, {"resize_s": -1.0}):
        with pytest.raises(PeerContract):
            job.piece(0, Facts(facts | wrong), pixels, None)
    with pytest.raises(PeerContract):
        job.piece(0, Facts(facts), pixels[1:], None)
