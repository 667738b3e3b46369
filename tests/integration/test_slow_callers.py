"""Callers that send their prompt byte by byte or read no answer delay no other caller and leave nothing behind.

They speak HTTP/2 frames to generation, since gRPC clients cannot be that slow.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from functools import partial

import pytest

from framesieve.cli.launcher import LocalStack
from framesieve.client.client import FramesieveClient
from framesieve.client.messages import generate_request
from framesieve.client.prompt import Options, Video, user_turn
from tests import media
from tests.integration.conftest import idle, metric
from tests.integration.fleet import until

CALLERS = 8
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS = 0, 1, 4
END_STREAM, ACK, END_HEADERS = 1, 1, 4
INITIAL_WINDOW_SIZE = 4


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream_id.to_bytes(4, "big") + payload


def headers(**more: str) -> bytes:
    """The headers of a call of Generate: indices of HPACK's static table and plain literals."""

    def plain(text: str) -> bytes:
        return bytes([len(text)]) + text.encode()

    post, http, path, authority = b"\x83", b"\x86", b"\x04", b"\x01"
    block = post + http + path + plain("/framesieve.v1.GenerationService/Generate") + authority + plain("localhost")
    own = {"content-type": "application/grpc", "te": "trailers", **more}
    return block + b"".join(b"\0" + plain(name.replace("_", "-")) + plain(value) for name, value in own.items())


def question(max_new_tokens: int = 1) -> bytes:
    """A message in gRPC's framing: a zero for uncompressed, its length, its bytes."""
    options: Options = {"max_new_tokens": max_new_tokens, "ignore_eos": True}
    data = generate_request([user_turn(None, "What moves?")], options).SerializeToString()
    return b"\0" + len(data).to_bytes(4, "big") + data


@asynccontextmanager
async def connected(
    stack: LocalStack, settings: bytes = b""
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_unix_connection(stack.address.removeprefix("unix:"))
    try:
        writer.write(PREFACE + frame(SETTINGS, 0, 0, settings) + frame(SETTINGS, ACK, 0))
        yield reader, writer
    finally:
        writer.close()


async def ended(reader: asyncio.StreamReader, stream_ids: Iterable[int]) -> None:
    """Returns once these streams have ended, each after data."""
    left, answered = set(stream_ids), set[int]()
    while left:
        head = await reader.readexactly(9)
        await reader.readexactly(int.from_bytes(head[:3], "big"))
        kind, flags, stream_id = head[3], head[4], int.from_bytes(head[5:], "big")
        if kind == DATA:
            answered.add(stream_id)
        if kind == HEADERS and flags & END_STREAM:
            assert stream_id in answered
            left.remove(stream_id)


def running(stack: LocalStack) -> float:
    return metric(stack, "generation", "framesieve_requests_running", method="Generate")


def outcomes(stack: LocalStack, code: str) -> float:
    return metric(stack, "generation", "framesieve_requests_total", method="Generate", code=code)


async def is_answered(client: FramesieveClient) -> None:
    answer = await client.ask(Video(data=media.clip()), "What moves?", max_new_tokens=4, timeout_s=30)
    assert answer.usage.completion_tokens


async def test_callers_that_send_slowly_delay_no_other_and_are_answered(
    stack: LocalStack, client: FramesieveClient
) -> None:
    asked, callers = question(), range(1, 2 * CALLERS, 2)
    await idle(stack)
    before = outcomes(stack, "OK")
    async with connected(stack) as (reader, writer):
        for caller in callers:
            writer.write(frame(HEADERS, END_HEADERS, caller, headers()))
        for at in range(len(asked) - 1):
            for caller in callers:
                writer.write(frame(DATA, 0, caller, asked[at : at + 1]))
        await writer.drain()
        await until(lambda: running(stack) == CALLERS)
        await is_answered(client)
        await until(lambda: outcomes(stack, "OK") == before + 1)
        assert running(stack) == CALLERS
        for caller in callers:
            writer.write(frame(DATA, END_STREAM, caller, asked[-1:]))
        async with asyncio.timeout(30):
            await ended(reader, callers)
    await until(lambda: outcomes(stack, "OK") == before + 1 + CALLERS)


@pytest.mark.parametrize("code", ["CANCELLED", "DEADLINE_EXCEEDED"])
async def test_a_caller_that_never_ends_its_prompt_leaves_nothing_behind(stack: LocalStack, code: str) -> None:
    await idle(stack)
    before = outcomes(stack, code)
    async with connected(stack) as (_, writer):
        deadline = {} if code == "CANCELLED" else {"grpc_timeout": "500m"}
        writer.write(frame(HEADERS, END_HEADERS, 1, headers(**deadline)) + frame(DATA, 0, 1, question()[:-1]))
        await until(lambda: running(stack) == 1 if code == "CANCELLED" else outcomes(stack, code) == before + 1)
    await until(lambda: outcomes(stack, code) == before + 1)
    await until(lambda: running(stack) == 0)


async def test_callers_that_read_nothing_delay_no_other_and_leave_nothing_behind(
    stack: LocalStack, client: FramesieveClient
) -> None:
    """Their flow-control window is 0 bytes."""
    nothing = INITIAL_WINDOW_SIZE.to_bytes(2, "big") + bytes(4)
    async with connected(stack, nothing) as (_, writer):
        for caller in range(1, 2 * CALLERS, 2):
            writer.write(frame(HEADERS, END_HEADERS, caller, headers()))
            writer.write(frame(DATA, END_STREAM, caller, question(100)))
        await until(lambda: running(stack) == CALLERS)
        await is_answered(client)
        # Their answers are generated all the same and then hold neither a place nor a block.
        for held in ("kv_blocks_used", "engine_requests", "media_buffer_used_bytes"):
            gauge = partial(metric, stack, "generation", f"framesieve_generation_{held}")
            await until(lambda gauge=gauge: gauge() == 0)  # type: ignore[misc]
        assert running(stack) == CALLERS
    await until(lambda: running(stack) == 0)
