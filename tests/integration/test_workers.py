"""What strangers' media do to the processes that decode them costs their own request, and nothing else."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import struct
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import grpc
import pytest
from framesieve.v1 import preprocessing_pb2, preprocessing_pb2_grpc, prompt_pb2
from PIL import Image as Pillow

from common.channels import open_channel, upstream_errors
from common.contract import errors
from framesieve.cli.launcher import LocalStack
from framesieve.client.client import FramesieveClient
from framesieve.client.prompt import Image, Video
from tests import media
from tests.integration.conftest import metric, running, settles
from tests.integration.fleet import children

READING_WORKERS, DECODING_WORKERS = 2, 1
# Of processor time: more than anybody needs who has nothing to do.
BUSY_TICKS = 10
MIB = 2**20


def cpu_ticks(process: int) -> int:
    """What it has used so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


def replaced(stack: LocalStack, reason: str) -> float:
    return metric(stack, "preprocessing", "framesieve_preprocessing_worker_restarts_total", reason=reason)


def png_that_claims(width: int, height: int) -> bytes:
    """A PNG of a few hundred kilobytes whose rows, of which some may be missing, are all zeros."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0)
    packer = zlib.compressobj(9)
    row = bytes(3 * width + 1)
    rows = min(height, 256 * MIB // len(row))
    packed = b"".join(packer.compress(row) for _ in range(rows)) + packer.flush()
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


def video_that_claims(width: int, height: int) -> bytes:
    """A GIF of two small frames on a screen of that size."""
    file = io.BytesIO()
    frames = [Pillow.new("P", (8, 8), colour) for colour in (1, 2)]
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    data = bytearray(file.getvalue())
    struct.pack_into("<2H", data, 6, width, height)
    return bytes(data)


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
    before = replaced(strict, "crashed")
    asking = asyncio.create_task(asked(strict, Video(server_path="long.mp4", fps=1.0)))
    jobs = partial(metric, strict, "preprocessing", "framesieve_preprocessing_jobs", pool="decode")
    assert await settles(jobs, 1, within_s=30)
    busy = await _busiest(pid)
    os.kill(busy, signal.SIGKILL)
    with pytest.raises(errors.MediaRejected, match=r"video cannot be decoded: its decoder crashed \(signal 9\)"):
        await asking
    assert await settles(partial(replaced, strict, "crashed"), before + 1)
    await the_next_is_served(strict)
    assert busy not in children(pid)


async def _busiest(service: int) -> int:
    """Its process that works while the others wait."""
    idle = {each: cpu_ticks(each) for each in children(service)}
    async with asyncio.timeout(30):
        while True:
            worked = {each: cpu_ticks(each) - ticks for each, ticks in idle.items()}
            if max(worked.values()) >= BUSY_TICKS:
                return max(worked, key=worked.__getitem__)
            await asyncio.sleep(0.02)


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
    assert await settles(partial(replaced, strict, "memory"), before + 1)
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
    checkpoint: Path, long_media: Path, flags: list[str], told: str, slow: int
) -> None:
    own = {"preprocessing": ["--decode-workers", "1", *flags]}
    with running(checkpoint, services=["preprocessing"], media_root=long_media, flags=own) as stack:
        async with open_channel(stack.addresses["preprocessing"]) as channel:
            with pytest.raises(errors.MediaRejected, match=told):
                await last_frame(channel)
        assert await settles(partial(replaced, stack, "slow"), slow)


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
