"""Media come out of worker processes as they come out in this one, and cost no more than is allowed."""

from __future__ import annotations

import gc
import io
import os
import random
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from common.errors import InvalidRequest, MediaDamaged, MediaRejected, PeerContract
from services.preprocessing.packets import MAX_FRAME_PX, MAX_PACKETS, PacketIndex, read_packets
from services.preprocessing.pictures import decode_picture, read_picture
from services.preprocessing.resize import UInt8Array, resize
from services.preprocessing.slices import PlannedPicture, PlannedVideo, Slice
from services.preprocessing.sources import Source, bytes_source, path_source
from services.preprocessing.workers import process, protocol
from services.preprocessing.workers.jobs import (
    IndexPicture,
    IndexVideo,
    Order,
    PictureSlices,
    VideoSlices,
    index_facts,
    index_of,
)
from services.preprocessing.workers.limits import Limits
from services.preprocessing.workers.pool import Pool
from services.preprocessing.workers.process import Fault
from services.preprocessing.workers.protocol import Facts
from tests.unit.preprocessing_media import HEIGHT_PX, WIDTH_PX, clip, number_of, without_packets

MIB = 2**20
LIMITS = Limits(wall_s=20, memory_bytes=1024 * MIB, file_bytes=16 * MIB, frames=10_000, length_s=10_000, pixels=2**40)
MUTATIONS = 2000


@pytest.fixture
def replaced() -> list[Fault]:
    return []


@pytest.fixture
async def pool(replaced: list[Fault]) -> AsyncIterator[Pool]:
    async with Pool(2, LIMITS, 64 * MIB, replaced.append) as made:
        yield made


def open_descriptors() -> int:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def planned(source: Source, index: PacketIndex, places: tuple[int, ...]) -> PlannedVideo:
    return PlannedVideo(source, index, places, 2, HEIGHT_PX, WIDTH_PX)


def numbers_of(slices: list[Slice]) -> list[int]:
    return [number_of(row) for each in slices for row in each.pixels]


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
    pool: Pool, container: str, codec: str, replaced: list[Fault]
) -> None:
    source = bytes_source("video", clip(40, container=container, codec=codec, options={"g": "12"}))
    index = await pool.call(IndexVideo(source))
    assert index == read_packets(source)
    video = planned(source, index, (0, 1, 7, 7, 13, 20, 31, 39))
    async with pool.ahead(VideoSlices(video)) as slices:
        ours = [each async for each in slices]
    assert numbers_of(ours) == list(video.places)
    assert same(ours, list(video.slices()))
    assert replaced == []


@pytest.mark.parametrize("format", ["AVIF", "BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP"])
async def test_a_picture_comes_out_as_it_does_in_process(pool: Pool, format: str) -> None:  # noqa: A002
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
    async with pool.ahead(PictureSlices(PlannedPicture(source, header, 56, 28))) as slices:
        (ours,) = [each async for each in slices]
    assert np.array_equal(ours.pixels[0], resize(decode_picture(source, header), 56, 28))


async def test_a_file_may_be_closed_as_soon_as_its_job_is_left(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "clip.mp4").write_bytes(clip(60))
    source = path_source("video", "clip.mp4", tmp_path)
    video = planned(source, await pool.call(IndexVideo(source)), tuple(range(60)))
    async with pool.ahead(VideoSlices(video)) as slices:
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
    async with Pool(1, LIMITS, 2 * MIB, replaced.append) as pool, pool.ahead(job) as slices:
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
    async with Pool(1, LIMITS, MIB, replaced.append) as pool, pool.ahead(job) as slices:
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
    pool: Pool, monkeypatch: pytest.MonkeyPatch
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
    async with pool.ahead(VideoSlices(video)) as slices:
        assert numbers_of([each async for each in slices]) == [0, 9]
    assert len(files) == 2
    assert len(set(files)) == 1


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
        async with Pool(1, limits, MIB, lambda _: None) as pool, pool.ahead(VideoSlices(video)) as slices:
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
    async with Pool(1, limits, MIB, replaced.append) as pool:
        with pytest.raises(MediaRejected, match=told):
            await pool.call(IndexVideo(source))
    assert replaced == []


async def test_a_picture_that_needs_too_much_memory_costs_a_worker_and_one_request(replaced: list[Fault]) -> None:
    file = io.BytesIO()
    Image.new("RGB", (6000, 6000)).save(file, "PNG")
    source = bytes_source("image", file.getvalue())
    async with Pool(1, replace(LIMITS, memory_bytes=64 * MIB), MIB, replaced.append) as pool:
        header = await pool.call(IndexPicture(source))
        async with pool.ahead(PictureSlices(PlannedPicture(source, header, 28, 28))) as slices:
            with pytest.raises(MediaRejected, match="image cannot be decoded: it needed more than 64 MiB"):
                await anext(slices)
        assert replaced == [Fault.MEMORY]
        assert (await pool.call(IndexPicture(source))).height_px == 6000


async def test_a_video_of_too_many_pixels_is_rejected_though_few_frames_are_wanted(replaced: list[Fault]) -> None:
    source = bytes_source("video", clip(60, options={"g": "60"}))
    index = read_packets(source)
    pixels = 50 * HEIGHT_PX * WIDTH_PX
    async with Pool(1, replace(LIMITS, pixels=pixels), MIB, replaced.append) as pool:
        async with pool.ahead(VideoSlices(planned(source, index, (0, 30)))) as slices:
            assert numbers_of([each async for each in slices]) == [0, 30]
        async with pool.ahead(VideoSlices(planned(source, index, (0, 59)))) as slices:
            with pytest.raises(MediaRejected, match=f"video has more than {pixels} pixels"):
                await anext(slices)
    assert replaced == []


async def test_damage_is_told_as_it_is_in_process(pool: Pool, replaced: list[Fault]) -> None:
    with pytest.raises(MediaRejected, match="video is no video that can be read"):
        await pool.call(IndexVideo(bytes_source("video", b"no video at all")))
    source = bytes_source("video", without_packets(clip(20, options={"g": "1"}), range(5, 10)))
    video = planned(source, await pool.call(IndexVideo(source)), tuple(range(20)))
    async with pool.ahead(VideoSlices(video)) as slices:
        with pytest.raises(MediaDamaged, match="frames cannot be decoded"):
            _ = [each async for each in slices]
    assert replaced == []


async def test_mutated_files_end_no_worker_and_leak_nothing(pool: Pool, replaced: list[Fault]) -> None:
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
            async with pool.ahead(VideoSlices(planned(source, index, tuple(range(frames))))) as slices:
                decoded += len([each async for each in slices])
        except InvalidRequest:
            pass
        source.close()
    assert decoded > MUTATIONS
    assert replaced == []
    assert open_descriptors() == descriptors


@pytest.mark.parametrize(
    "wrong",
    [
        {"frames": 0},
        {"frames": MAX_PACKETS + 1},
        {"frames": 59},
        {"frames": True},
        {"frames": 60.0},
        {"stored_pts": 59},
        {"tail_ticks": 0},
        {"time_base": []},
        {"time_base": [1, 0]},
        {"time_base": [1, 30, 1, 30]},
        {"time_base": ["1", "30"]},
        {"time_base": [2**63, 1]},
        {"time_base": [10**6, 1]},
        {"rates": [30]},
        {"rates": [30, 1] * 4},
        {"rates": "30"},
        {"height_px": 0},
        {"height_px": MAX_FRAME_PX, "width_px": 2},
        {"width_px": None},
    ],
)
def test_an_index_that_cannot_be_true_breaks_the_contract(wrong: dict[str, Any]) -> None:
    index = read_packets(bytes_source("video", clip(60)))
    facts, numbers = index_facts(index)
    assert index_of(Facts(facts), numbers) == index
    with pytest.raises(PeerContract):
        index_of(Facts(facts | wrong), numbers)


@pytest.mark.parametrize("place", [5, 61])
@pytest.mark.parametrize("value", [-(2**63), 2**63 - 1])
def test_an_index_out_of_order_breaks_the_contract(place: int, value: int) -> None:
    index = read_packets(bytes_source("video", clip(60, options={"g": "20"})))
    assert index.keyframes == (0, 10240, 20480)
    facts, numbers = index_facts(index)
    numbers[place] = value
    with pytest.raises(PeerContract):
        index_of(Facts(facts), numbers)


@pytest.mark.parametrize(
    "wrong", [{"repaired_frames": 3}, {"repaired_frames": -1}, {"decode_s": float("nan")}, {"resize_s": -1.0}]
)
def test_a_slice_that_cannot_be_true_breaks_the_contract(wrong: dict[str, Any]) -> None:
    job = VideoSlices(planned(bytes_source("video", b"media"), read_packets(bytes_source("video", clip(4))), (0, 1)))
    facts = {"repaired_frames": 0, "decode_s": 0.5, "resize_s": 0.25}
    pixels: UInt8Array = np.zeros(2 * HEIGHT_PX * WIDTH_PX * 3, np.uint8)
    assert job.piece(0, Facts(facts), pixels).pixels.shape == (2, HEIGHT_PX, WIDTH_PX, 3)
    with pytest.raises(PeerContract):
        job.piece(0, Facts(facts | wrong), pixels)
    with pytest.raises(PeerContract):
        job.piece(0, Facts(facts), pixels[1:])
