"""Callers that send their prompt byte by byte or read no answer delay no other caller and leave nothing behind.

They speak HTTP/2 frames to generation, since gRPC clients cannot be that slow.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from gridsieve.client.client import GridsieveClient
from gridsieve.client.messages import generate_request
from gridsieve.client.prompt import Options, Video, user_turn
from tests import media
from tests.http2 import ACK, DATA, END_HEADERS, END_STREAM, HEADERS, NO_WINDOW, PREFACE, SETTINGS, frame, headers
from tests.integration.conftest import idle, metric
from tests.integration.fleet import Stack, until

CALLERS = 8
STREAMS = range(1, 2 * CALLERS, 2)
GENERATE = "/gridsieve.v1.GenerationService/Generate"


def question() -> bytes:
    """A message in gRPC's framing: a zero for uncompressed, its length, its bytes."""
    options: Options = {"max_new_tokens": 100, "ignore_eos": True}
    data = generate_request([user_turn(None, "What moves?")], options).SerializeToString()
    return b"\0" + len(data).to_bytes(4, "big") + data


@asynccontextmanager
async def calling(stack: Stack, settings: bytes = b"") -> AsyncIterator[asyncio.StreamWriter]:
    """A connection on which each caller has begun a call."""
    await idle(stack)
    _, writer = await asyncio.open_unix_connection(stack.address.removeprefix("unix:"))
    try:
        writer.write(PREFACE + frame(SETTINGS, 0, 0, settings) + frame(SETTINGS, ACK, 0))
        for caller in STREAMS:
            writer.write(frame(HEADERS, END_HEADERS, caller, headers(GENERATE)))
        await until(lambda: running(stack) == CALLERS)
        yield writer
    finally:
        writer.close()


def running(stack: Stack) -> float:
    return metric(stack, "generation", "gridsieve_requests_running", method="Generate")


async def another_is_answered(stack: Stack, client: GridsieveClient) -> None:
    answer = await client.ask(Video(data=media.clip()), "What moves?", max_new_tokens=4, timeout_s=30)
    assert answer.usage.completion_tokens
    await until(lambda: running(stack) == CALLERS)


async def test_callers_that_send_slowly_delay_no_other_and_leave_nothing_behind(
    stack: Stack, client: GridsieveClient
) -> None:
    """Half of them complete their prompt, the others disconnect."""

    def outcomes() -> list[float]:
        counts = partial(metric, stack, "generation", "gridsieve_requests_total", method="Generate")
        return [counts(code="OK"), counts(code="CANCELLED")]

    asked = question()
    async with calling(stack) as writer:
        for at in range(len(asked) - 1):
            for caller in STREAMS:
                writer.write(frame(DATA, 0, caller, asked[at : at + 1]))
        await writer.drain()
        await another_is_answered(stack, client)
        answered, cancelled = outcomes()
        for caller in STREAMS[: CALLERS // 2]:
            writer.write(frame(DATA, END_STREAM, caller, asked[-1:]))
        await until(lambda: outcomes() == [answered + CALLERS // 2, cancelled])
    await until(lambda: outcomes() == [answered + CALLERS // 2, cancelled + CALLERS // 2])
    await until(lambda: running(stack) == 0)


async def test_callers_that_read_nothing_delay_no_other_and_leave_nothing_behind(
    stack: Stack, client: GridsieveClient
) -> None:
    """Their flow-control window is 0 bytes."""
    async with calling(stack, NO_WINDOW) as writer:
        for caller in STREAMS:
            writer.write(frame(DATA, END_STREAM, caller, question()))
        await another_is_answered(stack, client)
        # Their answers are generated all the same and then hold neither a place nor a block.
        for held in ("kv_blocks_used", "engine_requests", "media_buffer_used_bytes"):
            gauge = partial(metric, stack, "generation", f"gridsieve_generation_{held}")
            await until(lambda gauge=gauge: gauge() == 0)  # type: ignore[misc]
        assert running(stack) == CALLERS
    await until(lambda: running(stack) == 0)
