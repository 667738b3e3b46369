"""Media come out of worker processes as they come out in this one."""

from __future__ import annotations

import io
import os
import random
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from common.contract.errors import InvalidRequest, MediaDamaged, MediaRejected
from services.preprocessing.sources.source import bytes_source, path_source
from services.preprocessing.video.packets import read_packets
from services.preprocessing.video.pictures import decode_picture, read_picture
from services.preprocessing.video.resize import resize
from services.preprocessing.video.slices import PlannedPicture, Slice
from services.preprocessing.workers import process, protocol
from services.preprocessing.workers.job_queue import JobQueue
from services.preprocessing.workers.jobs import IndexPicture, IndexVideo, Order, PictureSlices, VideoSlices
from services.preprocessing.workers.process import Fault
from tests.preprocessing.pool_asks import MIB, open_descriptors
from tests.preprocessing.pool_media import LIMITS, numbers_of, planned
from tests.preprocessing.preprocessing_media import clip, without_packets

pytest_plugins = ["tests.preprocessing.fixtures"]
pytestmark = pytest.mark.usefixtures("no_stop_is_late")
MUTATIONS = 2000


@pytest.fixture
async def pool(replaced: list[Fault]) -> AsyncIterator[JobQueue]:
    async with JobQueue(2, LIMITS, 64 * MIB, replaced.append) as made:
        yield made


def same(ours: list[Slice], theirs: list[Slice]) -> bool:
    return len(ours) == len(theirs) and all(
        mine.first_frame == other.first_frame
        and mine.repaired_frames == other.repaired_frames
        and np.array_equal(mine.pixels, other.pixels)
        for mine, other in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize(
    ("container", "codec"),
    [
        ("mp4", "libx264"),
        ("matroska", "libx265"),
        ("avi", "mpeg4"),
        ("h264", "libx264"),
        ("webm", "libvpx-vp9"),
        ("mp4", "libsvtav1"),
        ("avi", "mjpeg"),
    ],
)
async def test_a_video_comes_out_as_it_does_in_process(
    pool: JobQueue, container: str, codec: str, replaced: list[Fault]
) -> None:
    source = bytes_source("video", clip(40, container=container, codec=codec, options={"g": "12"}))
    index = await pool.call(IndexVideo(source))
    assert index == read_packets(source)
    video = planned(source, index, (0, 1, 7, 7, 13, 20, 31, 39))
    async with pool.stream(VideoSlices(video)) as slices:
        ours = [each async for each in slices]
    assert numbers_of(ours) == list(video.places)
    assert same(ours, list(video.slices()))
    assert replaced == []


@pytest.mark.parametrize("format", ["AVIF", "BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP"])
async def test_a_picture_comes_out_as_it_does_in_process(pool: JobQueue, format: str) -> None:  # noqa: A002
    file = io.BytesIO()
    noise = np.random.default_rng(1).integers(0, 255, (31, 45, 3), np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6
    told = {"exif": exif} if format in ("JPEG", "PNG", "WEBP") else {}
    Image.fromarray(noise).save(file, format, **told)
    source = bytes_source("image", file.getvalue())
    header = await pool.call(IndexPicture(source))
    assert header == read_picture(source)
    assert (header.height_px, header.width_px) == ((45, 31) if told else (31, 45))
    async with pool.stream(PictureSlices(PlannedPicture(source, header, 56, 28))) as slices:
        (ours,) = [each async for each in slices]
    assert np.array_equal(ours.pixels[0], resize(decode_picture(source, header), 56, 28))


async def test_a_file_may_be_closed_as_soon_as_its_job_is_left(pool: JobQueue, tmp_path: Path) -> None:
    (tmp_path / "clip.mp4").write_bytes(clip(60))
    source = path_source("video", "clip.mp4", tmp_path)
    video = planned(source, await pool.call(IndexVideo(source)), tuple(range(60)))
    async with pool.stream(VideoSlices(video)) as slices:
        assert numbers_of([await anext(slices)]) == [0, 1]
    source.close()
    other = bytes_source("video", clip(10))
    assert len((await pool.call(IndexVideo(other))).times.ticks) == 10


@dataclass(frozen=True, slots=True)
class Watched(VideoSlices):
    """Notes after how many slices a worker was told to begin."""

    begun: list[int] = field(default_factory=list)

    def order(self, done: int) -> Order:
        self.begun.append(done)
        return VideoSlices.order(self, done)


@pytest.mark.parametrize("container", ["mp4", "avi"])
async def test_a_video_that_made_way_goes_on_with_the_same_frames(container: str, replaced: list[Fault]) -> None:
    source = bytes_source("video", clip(48, container=container, options={"g": "12", "bf": "2"}))
    index = read_packets(source)
    job = Watched(planned(source, index, tuple(range(0, 48, 3))))
    async with JobQueue(1, LIMITS, 2 * MIB, replaced.append) as pool, pool.stream(job) as slices:
        slow = [await anext(slices)]
        for _ in range(3):
            assert await pool.call(IndexVideo(source)) == index
            slow.append(await anext(slices))
        slow += [each async for each in slices]
    assert numbers_of(slow) == list(range(0, 48, 3))
    assert same(slow, list(job.video.slices()))
    assert len(job.begun) > 1
    assert job.begun == sorted(set(job.begun))
    assert replaced == []


MANY_KEYFRAMES = {"container": "matroska", "codec": "mjpeg"}


async def made_way_at(slices_before: int, data: bytes, places: tuple[int, ...], replaced: list[Fault]) -> list[Slice]:
    """What comes of a video whose only worker goes to somebody else after so many slices and comes back."""
    source = bytes_source("video", data)
    job = Watched(planned(source, read_packets(source), places))
    async with JobQueue(1, LIMITS, MIB, replaced.append) as pool, pool.stream(job) as slices:
        before = [await anext(slices) for _ in range(slices_before)]
        await pool.call(IndexVideo(source))
        whole = before + [each async for each in slices]
    assert job.begun == [0, slices_before]
    return whole


# A slice shows frames 4n and 4n + 2: damage far behind where it makes way, right behind, and on both sides.
@pytest.mark.parametrize(
    ("slices_before", "damaged"), [(12, [50, 54]), (5, [20]), (5, [20, 22]), (5, [18, 20]), (5, [16, 18, 20])]
)
async def test_a_tenth_of_the_whole_video_may_be_damaged_wherever_it_made_way(
    slices_before: int, damaged: list[int], replaced: list[Fault]
) -> None:
    places = tuple(range(0, 60, 2))
    data = without_packets(clip(60, **MANY_KEYFRAMES), damaged)
    source = bytes_source("video", data)
    whole = list(planned(source, read_packets(source), places).slices())
    assert sum(each.repaired_frames for each in whole) == len(damaged)
    ours = await made_way_at(slices_before, data, places, replaced)
    assert same(ours, whole)
    assert replaced == []


async def test_more_than_a_tenth_of_the_whole_video_is_damage_wherever_it_made_way(replaced: list[Fault]) -> None:
    data = without_packets(clip(60, **MANY_KEYFRAMES), [4, 8, 44, 48])
    with pytest.raises(MediaDamaged, match="4 of its 30 frames cannot be decoded, at most a tenth may be"):
        await made_way_at(10, data, tuple(range(0, 60, 2)), replaced)
    assert replaced == []


async def test_bytes_are_put_into_shared_memory_once_however_many_jobs_read_them(
    pool: JobQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    files: list[int] = []
    send = protocol.send

    def noted(connection: socket.socket, message: protocol.Message) -> None:
        if message.kind is protocol.Kind.JOB:
            files.append(os.fstat(message.descriptors[0]).st_ino)
        send(connection, message)

    monkeypatch.setattr(process, "send", noted)
    source = bytes_source("video", clip(10))
    video = planned(source, await pool.call(IndexVideo(source)), (0, 9))
    async with pool.stream(VideoSlices(video)) as slices:
        assert numbers_of([each async for each in slices]) == [0, 9]
    assert len(files) == 2
    assert len(set(files)) == 1


async def test_damage_is_told_as_it_is_in_process(pool: JobQueue, replaced: list[Fault]) -> None:
    with pytest.raises(MediaRejected, match="video is not a readable video"):
        await pool.call(IndexVideo(bytes_source("video", b"no video at all")))
    source = bytes_source("video", without_packets(clip(20, options={"g": "1"}), range(5, 10)))
    video = planned(source, await pool.call(IndexVideo(source)), tuple(range(20)))
    async with pool.stream(VideoSlices(video)) as slices:
        with pytest.raises(MediaDamaged, match="frames cannot be decoded"):
            _ = [each async for each in slices]
    assert replaced == []


async def test_mutated_files_end_no_worker_and_leak_nothing(pool: JobQueue, replaced: list[Fault]) -> None:
    clips = [clip(12, container=container) for container in ("mp4", "matroska", "mpegts", "avi", "h264")]
    chance = random.Random(4)
    descriptors = open_descriptors()
    decoded = 0
    for _ in range(MUTATIONS):
        data = bytearray(chance.choice(clips))
        for _ in range(chance.choice([1, 4, 64])):
            data[chance.randrange(len(data))] = chance.randrange(256)
        source = bytes_source("video", bytes(data[: chance.choice([len(data), chance.randrange(1, len(data))])]))
        try:
            index = await pool.call(IndexVideo(source))
            frames = min(len(index.times.ticks), 12) // 2 * 2
            async with pool.stream(VideoSlices(planned(source, index, tuple(range(frames))))) as slices:
                decoded += len([each async for each in slices])
        except InvalidRequest:
            pass
        source.close()
    assert decoded > MUTATIONS
    assert set(replaced) <= {Fault.MEMORY}  # some claim sizes that no worker may have, and may reach the claim or not
    assert open_descriptors() == descriptors
