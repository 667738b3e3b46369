"""Watch calls to cameras that send JPEGs by HTTP: slowly, without boundaries, or one a request."""

from __future__ import annotations

import asyncio
import gc
import time
from itertools import count
from typing import Any

import grpc
import numpy as np
import pytest

from tests.preprocessing.media_server import MULTIPART, head, jpeg, ok, serving
from tests.preprocessing.service import Service, refused
from tests.preprocessing.test_watch import Watched, all_of, opened

pytestmark = pytest.mark.asyncio(loop_scope="session")

FPS = 5


def numbers(watched: Watched) -> list[int]:
    return [round((float(np.mean(pixels)) - 20) / 10) for _, pixels in watched.frames]


LENGTH = b"Content-Type: image/jpeg\r\nContent-Length: %d\r\n\r\n"
NO_LENGTH = b"Content-Type: image/jpeg\r\n\r\n"


@pytest.mark.parametrize(
    ("header", "before", "after", "ahead"),
    [
        (MULTIPART, b"--next\r\n" + LENGTH, b"\r\n", 0),
        (MULTIPART, LENGTH, b"\r\n--next\r\n", 0),
        (MULTIPART, b"--next\r\n" + NO_LENGTH, b"\r\n", 1),
        (MULTIPART, b"--next\r\nContent-Type: image/jpg\r\n\r\n", b"\r\n", 1),
        ("Content-Type: image/jpeg", b"", b"", 1),
        ("X: without a type", b"", b"", 1),
    ],
    ids=["parts", "no first boundary", "no length", "another type", "bare", "bare, no type"],
)
async def test_the_first_picture_of_a_slow_camera_is_shown_when_it_has_come(
    service: Service, header: str, before: bytes, after: bytes, ahead: int
) -> None:
    """In small pieces. Where no length is sent, the next picture tells that the one before it is whole."""
    seen = asyncio.Semaphore(ahead + 1)

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(head(200, header))
        for number in range(6):
            await seen.acquire()
            picture = jpeg(number)
            part = before % len(picture) if b"%" in before else before
            for place in range(0, len(part + picture + after), 200):
                writer.write((part + picture + after)[place : place + 200])
                await writer.drain()
                await asyncio.sleep(0.01)

    async with serving(answer) as server, service.serving(server) as stub:
        watched = await opened(stub, f"http://clip.test:{server.port}/", fps=60)
        while await watched.next():  # it would wait for ever if one were not shown
            seen.release()
        assert numbers(watched)[:5] == list(range(5))  # FFmpeg takes the end for a cut of a part without a length


async def test_clips_of_jpegs_begin_with_the_first(stub: Any) -> None:
    watched = await opened(stub, fps=60)
    await all_of(watched, [jpeg(number) for number in range(3)])
    assert numbers(watched)[0] == 0


@pytest.mark.parametrize("media_type", ["image/jpeg", "application/octet-stream"])
async def test_a_picture_is_asked_for_again_and_again(service: Service, media_type: str) -> None:
    asked_s: list[float] = []

    async def answer(writer: asyncio.StreamWriter) -> None:
        asked_s.append(time.monotonic())
        writer.write(ok(jpeg(len(asked_s) - 1), f"Content-Type: {media_type}"))

    async with serving(answer) as server, service.serving(server) as stub:
        watched = await opened(stub, f"http://clip.test:{server.port}/", fps=FPS)
        for shown in count(1):
            assert await watched.next()
            if shown == 6:
                break
        watched.call.cancel()
    steps = np.diff(numbers(watched))  # on a busy machine, newer pictures may take the place of some
    assert (steps >= 1).all()
    assert steps.mean() < 2
    assert np.median(np.diff(asked_s)) > 0.7 / FPS  # on a busy machine, later


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        ([ok(jpeg(0), "Content-Type: image/jpeg"), head(503, "Content-Length: 0")], "was answered with status 503"),
        ([ok(jpeg(0), "Content-Type: image/jpeg"), ok(b"<html>")], "is no JPEG, and other pictures are not fetched"),
        ([ok(b"\x89PNG\r\n", "Content-Type: image/png")], "is no JPEG, and other pictures are not fetched again"),
    ],
)
async def test_a_picture_that_is_gone_or_no_jpeg_is_lost(service: Service, answers: list[bytes], why: str) -> None:
    left = iter(answers)

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(next(left))

    async with serving(answer) as server, service.serving(server) as stub:
        watched = await opened(stub, f"http://clip.test:{server.port}/", fps=FPS)
        code, _, text = await refused(watched.call)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert text.startswith(f"open.url {why}")
        assert server.connections == len(answers)
    gc.collect()  # the error's traceback holds the last frame
