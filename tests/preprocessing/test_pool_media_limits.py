"""Media that need more than is allowed cost their request, which is told why, and nobody else."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from PIL import Image

from common.contract.errors import InvalidRequest, MediaRejected
from services.preprocessing.sources.source import bytes_source
from services.preprocessing.video.packets import read_packets
from services.preprocessing.video.slices import PlannedPicture, PlannedVideo
from services.preprocessing.workers.job_queue import JobQueue
from services.preprocessing.workers.jobs import IndexPicture, IndexVideo, PictureSlices, VideoSlices
from services.preprocessing.workers.limits import Limits
from services.preprocessing.workers.process import Fault
from tests.preprocessing.pool_asks import MIB
from tests.preprocessing.pool_media import LIMITS, numbers_of, planned
from tests.preprocessing.preprocessing_media import HEIGHT_PX, WIDTH_PX, clip

pytest_plugins = ["tests.preprocessing.fixtures"]


async def test_a_lack_of_memory_is_told_as_such_though_the_decoder_speaks_of_damage() -> None:
    reference = {"preset": "ultrafast", "g": "12", "x264-params": "ref=8:bframes=3:b-pyramid=normal"}
    source = bytes_source("video", clip(12, size=(1920, 1920), options=reference))
    video = planned(source, read_packets(source), tuple(range(12)))
    # The decoder holds up to a dozen frames of 5.5 MB: it has room for some of them, for most, for all.
    ends = {memory_mib: await _end(video, memory_mib) for memory_mib in (80, 100, 108, 116, 180)}
    told = {each: f"video cannot be decoded: it needed more than {each} MiB" for each in ends}
    assert {each: end for each, end in ends.items() if end not in (None, told[each])} == {}
    assert (ends[80], ends[180]) == (told[80], None)


async def _end(video: PlannedVideo, memory_mib: int) -> str | None:
    """How a video with so much memory is refused, if it is."""
    limits = replace(LIMITS, memory_bytes=memory_mib * MIB)
    try:
        async with JobQueue(1, limits, MIB, lambda _: None) as pool, pool.stream(VideoSlices(video)) as slices:
            _ = [each async for each in slices]
    except InvalidRequest as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("limits", "told"),
    [
        (replace(LIMITS, file_bytes=100), r"video has \d+ bytes, at most 100 are allowed"),
        (replace(LIMITS, frames=59), "video has 60 frames, at most 59 are allowed"),
        (replace(LIMITS, length_s=1), "video lasts 2 s, at most 1 are allowed"),
    ],
)
async def test_media_that_pass_a_limit_are_rejected(limits: Limits, told: str, replaced: list[Fault]) -> None:
    source = bytes_source("video", clip(60))
    async with JobQueue(1, limits, MIB, replaced.append) as pool:
        with pytest.raises(MediaRejected, match=told):
            await pool.call(IndexVideo(source))
    assert replaced == []


async def test_a_picture_that_needs_too_much_memory_costs_a_worker_and_one_request(replaced: list[Fault]) -> None:
    file = io.BytesIO()
    Image.new("RGB", (6000, 6000)).save(file, "PNG")
    source = bytes_source("image", file.getvalue())
    async with JobQueue(1, replace(LIMITS, memory_bytes=64 * MIB), MIB, replaced.append) as pool:
        header = await pool.call(IndexPicture(source))
        async with pool.stream(PictureSlices(PlannedPicture(source, header, 28, 28))) as slices:
            with pytest.raises(MediaRejected, match="image cannot be decoded: it needed more than 64 MiB"):
                await anext(slices)
        assert replaced == [Fault.MEMORY]
        assert (await pool.call(IndexPicture(source))).height_px == 6000


async def test_a_video_of_too_many_pixels_is_rejected_though_few_frames_are_wanted(replaced: list[Fault]) -> None:
    source = bytes_source("video", clip(60, options={"g": "60"}))
    index = read_packets(source)
    pixels = 50 * HEIGHT_PX * WIDTH_PX
    async with JobQueue(1, replace(LIMITS, pixels=pixels), MIB, replaced.append) as pool:
        async with pool.stream(VideoSlices(planned(source, index, (0, 30)))) as slices:
            assert numbers_of([each async for each in slices]) == [0, 30]
        async with pool.stream(VideoSlices(planned(source, index, (0, 59)))) as slices:
            with pytest.raises(MediaRejected, match=f"video has more than {pixels} pixels"):
                await anext(slices)
    assert replaced == []
