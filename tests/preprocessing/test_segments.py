"""A video is decoded on idle workers side by side, and comes out as from one."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Sequence
from contextlib import aclosing
from itertools import combinations, pairwise

import numpy as np
import pytest
from PIL import Image

from gridsieve.common.contract.errors import MediaDamaged
from gridsieve.services.preprocessing.rpc import decode_stats
from gridsieve.services.preprocessing.sources.source import bytes_source
from gridsieve.services.preprocessing.video.cost import SliceCosts, slice_costs
from gridsieve.services.preprocessing.video.packets import read_packets
from gridsieve.services.preprocessing.video.pictures import read_pictures
from gridsieve.services.preprocessing.video.slices import PlannedVideo, Slice
from gridsieve.services.preprocessing.workers import job_queue, segments
from gridsieve.services.preprocessing.workers.job_queue import JobQueue
from gridsieve.services.preprocessing.workers.jobs import VideoSlices
from gridsieve.services.preprocessing.workers.process import WorkerProcess
from gridsieve.services.preprocessing.workers.segments import SegmentedDecoding, segment_ends
from tests.preprocessing.preprocessing_media import B_FRAMES, HEIGHT_PX, WIDTH_PX, clip, picture_of, without_packets
from tests.preprocessing.test_worker_media import assert_equal
from tests.preprocessing.worker_jobs import MIB, counting, read

pytestmark = pytest.mark.asyncio(loop_scope="module")
WORKERS = 2
GOP, FRAMES = 10, 120
DATA = clip(FRAMES, 25, "matroska", "mpeg4", {"g": str(GOP), "bf": "0"})
KEYFRAMES = clip(FRAMES, 25, "matroska", "mjpeg")


@pytest.fixture(autouse=True)
def short_videos_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "_MIN_S", 1e-6)


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """(begin, end, pieces done before) of each video job that is given to a worker."""
    sent: list[tuple[int, int, int]] = []
    send = job_queue._send_job

    def recorded(worker: WorkerProcess, job: object, done: int) -> None:
        if isinstance(job, VideoSlices):
            sent.append((job.begin, job.end, done))
        send(worker, job, done)  # type: ignore[arg-type]

    monkeypatch.setattr(job_queue, "_send_job", recorded)
    return sent


def planned(data: bytes, step: int = 2) -> PlannedVideo:
    source = bytes_source("video", data)
    return PlannedVideo(source, read_packets(source), tuple(range(0, FRAMES, step)), 2, (HEIGHT_PX, WIDTH_PX))


async def segmented(queue: JobQueue, video: PlannedVideo) -> list[Slice]:
    async with SegmentedDecoding(queue).slices_of(VideoSlices(video)) as slices:
        return [each async for each in slices]


async def test_two_workers_make_what_one_makes(queue: JobQueue, jobs: list[tuple[int, int, int]]) -> None:
    video = planned(DATA)
    assert_equal(await segmented(queue, video), list(video.slices()))
    assert jobs == [(0, 15, 0), (15, 30, 0)]  # slice 15 begins with frame 60, a keyframe


@pytest.mark.parametrize(
    ("damaged", "remade"),
    [([60], True), ([58, 59, 60, 61], True), ([4, 62, 100], False)],
)
async def test_damage_is_repaired_as_by_one_worker(
    queue: JobQueue, jobs: list[tuple[int, int, int]], damaged: list[int], remade: bool
) -> None:
    """Where a segment begins with damage, the other worker has the frame before."""
    video = planned(without_packets(KEYFRAMES, damaged), step=1)
    alone = list(video.slices())
    assert sum(each.repaired_frames for each in alone) == len(damaged)
    assert_equal(await segmented(queue, video), alone)
    assert jobs == [(0, 30, 0), (30, 60, 0), *[(30, 60, 0)] * remade]


async def test_a_segment_of_damage_alone_repeats_the_frame_before_it(queue: JobQueue) -> None:
    """Twelve segments of five slices: the last one can decode nothing."""
    video = planned(without_packets(KEYFRAMES, range(110, 120)), step=1)
    queue.inflight.size_bytes = WORKERS * 5 * MIB
    alone = list(video.slices())
    assert sum(each.repaired_frames for each in alone) == 10
    assert_equal(await segmented(queue, video), alone)


async def test_damage_of_all_segments_counts_together(queue: JobQueue) -> None:
    damaged = [*range(21, 28), *range(91, 98)]
    with pytest.raises(
        MediaDamaged, match=r"video is damaged: \d+ of its 120 frames cannot be decoded, at most a tenth"
    ):
        await segmented(queue, planned(without_packets(DATA, damaged), step=1))


async def test_a_segment_gives_way_to_a_job_that_waits(queue: JobQueue, jobs: list[tuple[int, int, int]]) -> None:
    """Neither segment is read meanwhile: both may be made whole, since there is room for them."""
    video = planned(clip(2000, 25, "matroska", "mpeg4", {"g": str(GOP), "bf": "0"}), step=1)
    video = PlannedVideo(video.source, video.index, tuple(range(2000)), 2, (480, 640))
    queue.inflight.size_bytes = 2**30
    async with SegmentedDecoding(queue).slices_of(VideoSlices(video)) as slices, aclosing(slices):
        await anext(slices)
        await asyncio.wait_for(read(queue, counting(1)), 20)
        async with asyncio.timeout(20):
            while len(jobs) < 3:
                await anext(slices)
    begin, end, done = jobs[2]
    assert (begin, end) == jobs[1][:2]
    assert done > 0


async def test_the_spans_of_decoding_end_when_the_last_slice_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is not the last in order where a second worker is faster, nor does the first in order begin them."""
    spans: dict[str, tuple[int, int]] = {}
    monkeypatch.setattr(
        decode_stats, "record", lambda stage, began, ended, *_, **__: spans.update({stage: (began, ended)})
    )
    nothing = np.empty((1, 0, 0, 3), np.uint8)
    with decode_stats.DecodeStats(0) as stats:
        for number, decoded_ns in enumerate([30, 50, 20, 40]):
            stats.count(Slice(number, nothing, 0, 0.0, 0.0, decoded_ns, decoded_ns + 5))
    assert (spans["decode"][1], spans["resize"]) == (50, (20, 55))


async def test_a_busy_pool_and_a_short_video_are_not_split(
    queue: JobQueue, jobs: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    video = planned(DATA)
    async with queue.stream(counting(2)) as pieces:
        await anext(pieces)
        queue.inflight.size_bytes = 1  # keeps its worker until the second piece is read
        await segmented(queue, video)
    queue.inflight.size_bytes = 2**26
    monkeypatch.setattr(segments, "_MIN_S", 1.0)
    await segmented(queue, video)
    assert jobs == [(0, 30, 0), (0, 30, 0)]


async def test_pictures_are_divided_by_their_bytes(queue: JobQueue, jobs: list[tuple[int, int, int]]) -> None:
    files, ends = io.BytesIO(), []
    for number in range(8):
        Image.fromarray(picture_of(number)).save(files, "PNG")
        ends.append(files.tell())
    source = bytes_source("pictures", files.getvalue())
    video = PlannedVideo(source, read_pictures(source, ends), tuple(range(8)), 2, (HEIGHT_PX, WIDTH_PX))
    assert_equal(await segmented(queue, video), list(video.slices()))
    assert len(jobs) == WORKERS
    alone = bytes_source("picture", files.getvalue()[: ends[0]])
    image = PlannedVideo(alone, read_pictures(alone, ()), (0,), 1, (HEIGHT_PX, WIDTH_PX))
    assert_equal(await segmented(queue, image), list(image.slices()))


async def test_more_segments_than_workers_follow_one_another_where_the_budget_is_small(
    queue: JobQueue, jobs: list[tuple[int, int, int]]
) -> None:
    video = planned(DATA)
    queue.inflight.size_bytes = WORKERS * 5 * MIB
    assert_equal(await segmented(queue, video), list(video.slices()))
    assert [begin for begin, _, _ in jobs] == [0, 5, 10, 15, 20, 25]


@pytest.mark.parametrize(
    ("container", "codec", "options"),
    [
        ("mp4", "libx264", {"x264-params": "open-gop=1:keyint=12:bframes=3:b-adapt=0:scenecut=0:threads=1"}),
        ("mp4", "libx264", {**B_FRAMES, "threads": "1"}),
        ("mp4", "libx265", {"x265-params": "keyint=12:pools=none:frame-threads=1:log-level=none"}),
        ("webm", "libvpx-vp9", {"g": "12", "cpu-used": "8", "deadline": "realtime"}),
        ("mpegts", "mpeg2video", {"g": "12", "bf": "2"}),
    ],
)
async def test_slices_are_the_same_whatever_the_cut_and_the_threads(
    container: str, codec: str, options: dict[str, str]
) -> None:
    """Also where a segment begins with a slice in the middle of a group of pictures."""
    source = bytes_source("video", clip(48, 25, container, codec, options, size=(360, 640)))
    video = PlannedVideo(source, read_packets(source), tuple(range(0, 48, 3)), 2, (HEIGHT_PX, WIDTH_PX))
    whole = list(video.slices())
    for threads in (2, 8):
        assert_equal(list(video.slices(threads=threads)), whole)
    for begin in range(1, len(whole)):
        rest = [each.pixels for each in video.only(range(begin, len(whole))).slices()]
        assert all(np.array_equal(each, alone.pixels) for each, alone in zip(rest, whole[begin:], strict=True))


async def test_segments_are_the_ones_whose_longest_costs_least() -> None:
    """Against all divisions that decode at most an eighth of a segment twice."""
    random = np.random.default_rng(0)
    for _ in range(40):
        continued = random.uniform(0.5, 2, 9)
        costs = SliceCosts(continued, continued + random.choice([0, 0.3, 3], 9))

        def of(begin: int, end: int, costs: SliceCosts = costs) -> float:
            cost = float(costs.continued[begin:end].sum())
            return cost + float(costs.begun[begin] - costs.continued[begin]) if begin else cost

        for most in (1, 2, 3, 4):
            ends, longest_s = segment_ends(costs, most)
            assert len(ends) <= most
            assert max(of(*each) for each in pairwise([0, *ends])) == pytest.approx(longest_s, rel=1e-4)
            best = min(
                longest
                for count in range(most)
                for cuts in combinations(range(1, 9), count)
                if (longest := max(of(*each) for each in pairwise([0, *cuts, 9])))
                and all(costs.begun[cut] - costs.continued[cut] <= longest / 8 for cut in cuts)
            )
            assert longest_s == pytest.approx(best, rel=1e-4) or best > 0.9 * of(0, 9)


async def test_the_cost_of_slices_follows_the_packets_that_are_decoded_for_them() -> None:
    """Packets from the keyframe before a slice, or from the slice before it, whichever is later."""
    video = planned(DATA, step=6)  # 20 places, a keyframe every 10
    costs, index = slice_costs(video), video.index
    frame_px = HEIGHT_PX * WIDTH_PX

    def expected(first: int, last: int, selected: int) -> float:
        assert index.sizes  # type: ignore[union-attr]
        sizes: Sequence[int] = index.sizes[first : last + 1]  # type: ignore[union-attr]
        return sum(sizes) * 88e-9 + len(sizes) * frame_px * 0.44e-9 + selected * frame_px * 9.4e-9

    slices = zip(video.places[::2], video.places[1::2], (-1, *video.places[1::2]), strict=False)
    for number, (first, last, before) in enumerate(slices):
        begin, middle = first // GOP * GOP, last // GOP * GOP
        # Nothing is decoded between the first frame and the keyframe of the second one.
        rest = expected(max(first + 1, middle), last, 2)
        assert costs.begun[number] == pytest.approx(expected(begin, first, 0) + rest)
        assert costs.continued[number] == pytest.approx(expected(max(before + 1, begin), first, 0) + rest)
