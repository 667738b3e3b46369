"""What strangers' media do to the processes that decode them costs their own request, and nothing else."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import struct
import zlib
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial
from pathlib import Path

import av
import grpc
import numpy as np
import pytest
from PIL import Image as Pillow

from client.client import FramesieveClient
from client.launcher import LocalStack
from client.prompt import Image, Video
from common import errors
from common.channels import open_channel, upstream_errors
from framesieve.v1 import preprocessing_pb2, preprocessing_pb2_grpc, prompt_pb2
from tests import media
from tests.integration.conftest import metric, settles
from tests.integration.fleet import children, runs

READING_WORKERS, DECODING_WORKERS = 2, 1
MIB = 2**20


def cpu_ticks(process: int) -> int:
    """What it has used so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


def replaced(stack: LocalStack, reason: str) -> float:
    return metric(stack, "preprocessing", "framesieve_preprocessing_worker_restarts_total", reason=reason)


def long_clip() -> bytes:
    """120 s of 1280 × 720 with one keyframe: to show its last frame, all of them must be decoded."""
    file = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 255, (90, 160, 3), np.uint8).repeat(8, 0).repeat(8, 1)
    with av.open(file, "w", format="mp4") as output:
        stream = output.add_stream("libx264", rate=Fraction(25, 2), options={"g": "100000", "preset": "ultrafast"})
        stream.width, stream.height, stream.pix_fmt = 1280, 720, "yuv420p"
        for number in range(1500):
            output.mux(stream.encode(av.VideoFrame.from_ndarray(np.roll(noise, number, 1), format="rgb24")))
        output.mux(stream.encode())
    return file.getvalue()


def png_that_claims(width: int, height: int) -> bytes:
    """A PNG of a few hundred kilobytes whose rows are all zeros."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0)
    packer = zlib.compressobj(9)
    row = bytes(3 * width + 1)
    packed = b"".join(packer.compress(row) for _ in range(min(height, 8000))) + packer.flush()
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


def video_that_claims(width: int, height: int) -> bytes:
    """A GIF of two small frames on a screen of that size."""
    file = io.BytesIO()
    frames = [Pillow.new("P", (8, 8), colour) for colour in (1, 2)]
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    data = bytearray(file.getvalue())
    struct.pack_into("<2H", data, 6, width, height)
    return bytes(data)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("long")
    (made / "long.mp4").write_bytes(long_clip())
    return made


@pytest.fixture(scope="module")
def strict(checkpoint: Path, folder: Path) -> Iterator[LocalStack]:
    """One worker that decodes, in little memory."""
    flags = ["--decode-workers", "1", "--decode-memory-bytes", str(192 * MIB)]
    with LocalStack(checkpoint, media_root=folder, flags={"preprocessing": flags}) as running:
        yield running


async def asked(stack: LocalStack, part: Video | Image) -> None:
    async with FramesieveClient(stack.address) as client:
        answer = await client.ask(part, "What moves?", max_new_tokens=2, timeout_s=120)
    assert answer.usage.completion_tokens >= 1


async def the_next_is_served(stack: LocalStack) -> None:
    await asked(stack, Video(data=media.clip()))
    pid = stack.processes["preprocessing"].pid
    assert await settles(lambda: len(children(pid)), READING_WORKERS + DECODING_WORKERS)
    assert await settles(partial(metric, stack, "preprocessing", "framesieve_preprocessing_jobs"), 0)
    assert await settles(partial(metric, stack, "preprocessing", "framesieve_preprocessing_inflight_used_bytes"), 0)


async def test_a_worker_that_is_killed_costs_one_request_and_is_replaced(strict: LocalStack) -> None:
    pid = strict.processes["preprocessing"].pid
    before, idle = replaced(strict, "crashed"), {each: cpu_ticks(each) for each in children(pid)}
    asking = asyncio.create_task(asked(strict, Video(server_path="long.mp4", fps=1.0)))
    jobs = partial(metric, strict, "preprocessing", "framesieve_preprocessing_jobs", pool="decode")
    assert await settles(jobs, 1, within_s=30)
    busy = await _busiest(idle)
    os.kill(busy, signal.SIGKILL)
    with pytest.raises(errors.MediaRejected, match=r"video cannot be decoded: its decoder crashed \(signal 9\)"):
        await asking
    assert replaced(strict, "crashed") == before + 1
    await the_next_is_served(strict)
    assert busy not in children(pid)


async def _busiest(idle: dict[int, int]) -> int:
    """The process that works while the others wait."""
    await asyncio.sleep(0.5)
    return max(idle, key=lambda each: cpu_ticks(each) - idle[each])


@pytest.mark.parametrize(
    ("part", "told"),
    [
        (lambda: Image(data=png_that_claims(9000, 9000)), "frames of 9000×9000 pixels, at most 67108864"),
        (lambda: Image(data=png_that_claims(60_000, 60_000)), "image has far more pixels than the 67108864"),
        (lambda: Video(data=video_that_claims(12_000, 12_000)), "frames of 12000×12000 pixels, at most 67108864"),
    ],
    ids=["a picture", "a huge picture", "a video"],
)
async def test_what_claims_enormous_frames_is_refused_before_they_are_made(
    strict: LocalStack, part: Callable[[], Image | Video], told: str
) -> None:
    before = replaced(strict, "memory")
    with pytest.raises(errors.MediaRejected, match=told):
        await asked(strict, part())
    assert replaced(strict, "memory") == before
    await the_next_is_served(strict)


async def test_a_bomb_below_the_largest_size_ends_at_its_worker_s_memory(strict: LocalStack) -> None:
    before = replaced(strict, "memory")
    bomb = png_that_claims(8000, 8000)
    assert len(bomb) < MIB
    with pytest.raises(errors.MediaRejected, match="image cannot be decoded: it needed more than 192 MiB"):
        await asked(strict, Image(data=bomb))
    assert replaced(strict, "memory") == before + 1
    await the_next_is_served(strict)


@pytest.mark.parametrize(
    ("flags", "told", "slow"),
    [
        (["--decode-timeout-s", "1"], r"video cannot be decoded: it took more than 1 s", 1),
        (["--decode-max-pixels", str(2**28)], "video has more than 268435456 pixels", 0),
        (["--media-max-s", "60"], "video lasts 120 s, at most 60 are allowed", 0),
        (["--media-max-bytes", "100000"], r"video has \d+ bytes, at most 100000 are allowed", 0),
    ],
)
async def test_a_video_that_passes_a_limit_is_refused(
    checkpoint: Path, folder: Path, flags: list[str], told: str, slow: int
) -> None:
    own = {"preprocessing": ["--decode-workers", "1", *flags]}
    with LocalStack(checkpoint, services=["preprocessing"], media_root=folder, flags=own) as running:
        async with open_channel(running.addresses["preprocessing"]) as channel:
            with pytest.raises(errors.MediaRejected, match=told):
                await last_frame(channel)
        assert await settles(partial(replaced, running, "slow"), slow)


async def last_frame(channel: grpc.aio.Channel) -> None:
    """Asks preprocessing for a few frames of the long clip, of which the last needs all of it decoded."""
    call = preprocessing_pb2_grpc.PreprocessingServiceStub(channel).Preprocess()
    media = prompt_pb2.Media(path="long.mp4", frame_sampling=prompt_pb2.FrameSampling(fps=0.1))
    message = prompt_pb2.Message(role=prompt_pb2.ROLE_USER, parts=[prompt_pb2.Part(video=media)])
    with upstream_errors("preprocessing"):
        await call.write(preprocessing_pb2.PreprocessRequest(prompt=prompt_pb2.Prompt(messages=[message])))
        await call.read()
        await call.write(preprocessing_pb2.PreprocessRequest(select=prompt_pb2.Select(all=True)))
        await call.done_writing()
        while await call.read() is not grpc.aio.EOF:
            pass


async def test_preprocessing_that_is_killed_leaves_no_worker_behind(checkpoint: Path) -> None:
    with LocalStack(checkpoint, services=["preprocessing"]) as running:
        preprocessing = running.processes["preprocessing"]
        workers = children(preprocessing.pid)
        assert len(workers) >= READING_WORKERS + 1
        preprocessing.kill()
        preprocessing.wait()
        assert await settles(lambda: sum(map(runs, workers)), 0)
