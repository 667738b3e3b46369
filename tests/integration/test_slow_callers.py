"""Callers that drip their prompt or read nothing, in HTTP/2's own frames: nobody else waits, and nothing stays of them.

Three real processes, of which the callers know generation.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from functools import partial

import pytest
from framesieve.v1 import prompt_pb2
from framesieve.v1.generation_pb2 import GenerateRequest, Sampling

from framesieve.cli.launcher import LocalStack
from framesieve.client.client import FramesieveClient
from framesieve.client.prompt import Video
from tests import media
from tests.integration.conftest import idle, metric, settles

CALLERS = 8
PIECE_BYTES = 4
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS = 0, 1, 4
END_STREAM, ACK, END_HEADERS = 1, 1, 4
INITIAL_WINDOW_SIZE = 4


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream_id.to_bytes(4, "big") + payload


def plain(text: str) -> bytes:
    assert len(text) < 127
    return bytes([len(text)]) + text.encode()


def headers(**more: str) -> bytes:
    """Of a call of Generate: numbers are of HPACK's table, and nothing is compressed."""
    post, http, path, authority = b"\x83", b"\x86", b"\x04", b"\x01"
    block = post + http + path + plain("/framesieve.v1.GenerationService/Generate") + authority + plain("localhost")
    own = {"content-type": "application/grpc", "te": "trailers", **more}
    return block + b"".join(b"\0" + plain(name.replace("_", "-")) + plain(value) for name, value in own.items())


def question(max_new_tokens: int = 1, text: str = "What moves?") -> bytes:
    """As gRPC frames it: not compressed, its length, the message."""
    asked = prompt_pb2.Message(role=prompt_pb2.ROLE_USER, parts=[prompt_pb2.Part(text=text)])
    sampling = Sampling(max_new_tokens=max_new_tokens, ignore_eos=True)
    data = GenerateRequest(prompt=prompt_pb2.Prompt(messages=[asked]), sampling=sampling).SerializeToString()
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
    """Returns once these streams have ended, each behind data."""
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


@pytest.fixture
async def client(stack: LocalStack) -> AsyncIterator[FramesieveClient]:
    async with FramesieveClient(stack.address) as connected:
        yield connected


def requests_running(stack: LocalStack) -> float:
    return metric(stack, "generation", "framesieve_requests_running", method="Generate")


def outcomes(stack: LocalStack, code: str) -> float:
    return metric(stack, "generation", "framesieve_requests_total", method="Generate", code=code)


async def test_callers_that_drip_hold_nobody_up_and_are_answered_in_the_end(
    stack: LocalStack, client: FramesieveClient
) -> None:
    asked, callers = question(), range(1, 2 * CALLERS, 2)
    await idle(stack)
    before = outcomes(stack, "OK")
    async with connected(stack) as (reader, writer):
        for caller in callers:
            writer.write(frame(HEADERS, END_HEADERS, caller, headers()))
        assert await settles(partial(requests_running, stack), CALLERS)
        for start in range(0, len(asked) - PIECE_BYTES, PIECE_BYTES):
            for caller in callers:
                writer.write(frame(DATA, 0, caller, asked[start : start + PIECE_BYTES]))
            await writer.drain()
            if start == 2 * PIECE_BYTES:
                answer = await client.ask(Video(data=media.clip()), "What moves?", max_new_tokens=4, timeout_s=30)
                assert answer.usage.completion_tokens
            await asyncio.sleep(0.01)
        assert await settles(partial(outcomes, stack, "OK"), before + 1)
        assert requests_running(stack) == CALLERS
        last = (len(asked) - 1) // PIECE_BYTES * PIECE_BYTES
        for caller in callers:
            writer.write(frame(DATA, END_STREAM, caller, asked[last:]))
        async with asyncio.timeout(30):
            await ended(reader, callers)
    assert await settles(partial(outcomes, stack, "OK"), before + 1 + CALLERS)


@pytest.mark.parametrize("leaves", ["by going", "by its deadline"])
async def test_a_caller_that_never_ends_its_prompt_leaves_nothing_behind(stack: LocalStack, leaves: str) -> None:
    code = "CANCELLED" if leaves == "by going" else "DEADLINE_EXCEEDED"
    await idle(stack)
    before = outcomes(stack, code)
    async with connected(stack) as (_, writer):
        deadline = {} if leaves == "by going" else {"grpc_timeout": "500m"}
        writer.write(frame(HEADERS, END_HEADERS, 1, headers(**deadline)) + frame(DATA, 0, 1, question()[:-1]))
        if leaves == "by going":
            assert await settles(partial(requests_running, stack), 1)
        else:
            assert await settles(partial(outcomes, stack, code), before + 1)
    assert await settles(partial(outcomes, stack, code), before + 1)
    assert await settles(partial(requests_running, stack), 0)


async def test_callers_that_read_nothing_hold_nobody_up_and_leave_nothing_behind(
    stack: LocalStack, client: FramesieveClient
) -> None:
    """They grant the service no byte of an answer."""
    nothing = INITIAL_WINDOW_SIZE.to_bytes(2, "big") + bytes(4)
    async with connected(stack, nothing) as (_, writer):
        for caller in range(1, 2 * CALLERS, 2):
            writer.write(frame(HEADERS, END_HEADERS, caller, headers()))
            writer.write(frame(DATA, END_STREAM, caller, question(100)))
        assert await settles(partial(requests_running, stack), CALLERS)
        answer = await client.ask(Video(data=media.clip()), "What moves?", max_new_tokens=4, timeout_s=30)
        assert answer.usage.completion_tokens
        # They are answered all the same, which keeps neither a place nor a block.
        for held in ("kv_blocks_used", "engine_requests", "media_buffer_used_bytes"):
            assert await settles(partial(metric, stack, "generation", f"framesieve_generation_{held}"), 0)
        assert requests_running(stack) == CALLERS
    assert await settles(partial(requests_running, stack), 0)
