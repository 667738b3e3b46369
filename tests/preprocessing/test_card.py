"""A video that a card decodes has the frames of one that the CPU decodes. No card is needed: `fake_card` has none."""

from __future__ import annotations

import ctypes
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from av.error import ExternalError, FFmpegError, InvalidDataError
from av.video.reformatter import ColorPrimaries, ColorRange, ColorTrc
from av.video.stream import VideoStream

from gridsieve.services.preprocessing.sources.source import bytes_source
from gridsieve.services.preprocessing.video.card import Card
from gridsieve.services.preprocessing.video.decode import DecodedFrame, decode_frames
from gridsieve.services.preprocessing.video.packets import read_packets
from gridsieve.services.preprocessing.video.slices import PlannedVideo
from gridsieve.services.preprocessing.workers import segments
from gridsieve.services.preprocessing.workers.job_queue import JobQueue
from gridsieve.services.preprocessing.workers.jobs import VideoSlices
from gridsieve.services.preprocessing.workers.process import Fault
from gridsieve.services.preprocessing.workers.segments import SegmentedDecoding
from tests.media.test_display import BT2020_NCL, encoded, nothing
from tests.preprocessing.fake_card import FakeCard
from tests.preprocessing.preprocessing_media import without_packets
from tests.preprocessing.test_worker_media import assert_equal
from tests.preprocessing.worker_jobs import LIMITS, MIB, Ask, until

FRAMES, PLACES = 16, (0, 2, 2, 3, 7, 10, 15)


def hdr(stream: VideoStream) -> None:
    codec = stream.codec_context
    codec.color_trc, codec.color_primaries = ColorTrc.SMPTE2084, ColorPrimaries.BT2020
    codec.colorspace, codec.color_range = BT2020_NCL, ColorRange.MPEG


def bt709(stream: VideoStream) -> None:
    stream.codec_context.colorspace, stream.codec_context.color_range = 1, ColorRange.MPEG


def film(
    codec: str = "libx264",
    pixel_format: str = "yuv420p",
    size: tuple[int, int] = (96, 128),
    prepare: Callable[[VideoStream], None] = nothing,
    **options: str,
) -> bytes:
    """Coloured squares, other ones in each frame: swscale makes another RGB of NV12 than of YUV420P."""
    random, frames = np.random.default_rng(0), []
    for _ in range(FRAMES):
        squares = random.integers(0, 256, (-(-size[0] // 8), -(-size[1] // 8), 3), np.uint8)
        pixels = np.ascontiguousarray(squares.repeat(8, 0).repeat(8, 1)[: size[0], : size[1]])
        frames.append(av.VideoFrame.from_ndarray(pixels, format="rgb24").reformat(format=pixel_format, threads=1))
    return encoded(frames, "matroska", codec, prepare, g="5", **options)


def decoded(data: bytes, card: Card | None = None) -> list[DecodedFrame]:
    source = bytes_source("video", data)
    return list(decode_frames(source, read_packets(source), PLACES, whole=100, card=card))


def assert_as_on_the_cpu(data: bytes, card: Card) -> None:
    for ours, theirs in zip(decoded(data, card), decoded(data), strict=True):
        assert ours.repaired == theirs.repaired
        assert np.array_equal(ours.pixels, theirs.pixels)


X265 = {"x265-params": "log-level=none:pools=1"}
ON_CARD: dict[str, dict[str, Any]] = {
    "h264": {"bf": "3"},
    "full range": {"pixel_format": "yuvj420p", "prepare": bt709},
    "fields": {"flags": "+ilme+ildct"},
    "hevc": {"codec": "libx265", "pixel_format": "yuv420p10le", **X265},
    "hdr": {"codec": "libx265", "pixel_format": "yuv420p10le", "prepare": hdr, **X265},
    "vp8": {"codec": "libvpx"},
    "vp9": {"codec": "libvpx-vp9"},
}
AV1 = {"codec": "libsvtav1", "preset": "12"}


# swscale computes its table of colours for seconds.
DEEP = {"hdr": pytest.mark.deep}


@pytest.mark.parametrize("name", [pytest.param(each, marks=DEEP.get(each, ())) for each in ON_CARD])
def test_frames_of_a_card_are_those_of_the_cpu(name: str) -> None:
    card = FakeCard()
    assert_as_on_the_cpu(film(**ON_CARD[name]), card)
    assert card.on_card == len(set(PLACES))


@pytest.mark.parametrize(
    ("made", "opened"),
    [
        (AV1, ["av1"]),  # by the decoder of FFmpeg that decodes on cards alone
        ({"codec": "libvpx-vp9", "pixel_format": "yuva420p"}, []),
        ({"codec": "mpeg4"}, []),
        ({"codec": "mpeg2video"}, []),
        ({"codec": "mjpeg", "pixel_format": "yuvj420p"}, []),
    ],
)
def test_the_cpu_decodes_what_is_not_for_a_card(made: dict[str, Any], opened: list[str]) -> None:
    card = FakeCard()
    assert_as_on_the_cpu(film(**made), card)
    assert (card.opened, card.on_card) == (opened, 0)


@pytest.mark.parametrize(
    ("failure", "lost"),
    [
        (ExternalError(-542398533, "an error of CUDA"), True),
        (InvalidDataError(-1094995529, "damaged"), False),
        ({"format": "nv16"}, False),
        ({"width": 160}, False),
    ],
    ids=["cuda", "damage", "format", "size"],
)
def test_what_a_card_fails_at_the_cpu_decodes(failure: FFmpegError | dict[str, Any], lost: bool) -> None:
    """Here from the middle of a video on, of which a later frame is damaged."""
    card = FakeCard(failure, at=4)
    assert_as_on_the_cpu(without_packets(film(bf="0"), [10]), card)
    assert 0 < card.on_card < len(set(PLACES))
    assert card.lost == lost


@pytest.mark.asyncio
async def test_workers_with_a_card_make_the_same_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """They keep some of the sandbox; one whose card is lost gets no other job."""
    monkeypatch.setattr(segments, "_MIN_S", 1e-6)
    source, replaced = bytes_source("video", film()), list[Fault]()
    video = PlannedVideo(source, read_packets(source), tuple(range(FRAMES)), 2, (48, 64))
    async with JobQueue(2, LIMITS, 64 * MIB, replaced.append, "tests.preprocessing.fake_card") as queue:
        assert queue.workers.confined_by == frozenset()
        async with SegmentedDecoding(queue).slices_of(VideoSlices(video)) as slices:
            assert_equal([each async for each in slices], list(video.slices()))
        with socket.create_server(("127.0.0.1", 0)) as server:
            seen, _ = await queue.call(Ask("confined", {"port": server.getsockname()[1]}))
        assert (seen.values["password"], seen.values["core"], seen.values["no_new_privileges"]) == ("done", 0, 1)
        if ctypes.CDLL(None).syscall(444, None, 0, 1) >= 6:  # landlock_create_ruleset, asked for its version
            assert (seen.values["connect"], seen.values["signal"]) == ("EACCES", "EPERM")
        of_worker, _ = await queue.call(Ask("lose"))
        assert of_worker.values["on_card"] > 0
        await until(lambda: len(queue.workers._idle) == 2)
        assert replaced == [Fault.CRASHED]


def test_without_a_card_the_service_does_not_start(tiny_checkpoint: Path, tmp_path: Path) -> None:
    if _has_driver():
        pytest.skip("this machine has NVIDIA's driver")
    command = ("-m", "gridsieve.services.preprocessing", "--model", str(tiny_checkpoint), "--decoder", "nvdec")
    flags = ("--listen", f"unix:{tmp_path}/socket", "--metrics-port", "0")
    ended = subprocess.run([sys.executable, *command, *flags], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert "--decoder nvdec: no card can be used: libcuda.so.1: cannot open" in ended.stderr


def _has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
