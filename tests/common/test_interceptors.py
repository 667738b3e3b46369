"""Requests whose caller has disconnected, and long errors of peers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, cast

import grpc
import structlog

from common.contract.errors import InvalidRequest, PeerContract
from common.security.quotas import ClientQuotas
from common.serving.interceptors import guarded
from common.serving.status import MAX_MESSAGE_BYTES

METHOD = "/framesieve.v1.EncoderService/Encode"


class Disconnected:
    """The context of a call whose caller has just disconnected."""

    aborted = 0

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def peer_identities(self) -> None:
        return None

    def peer(self) -> str:
        return "unix:"

    def time_remaining(self) -> None:
        return None

    async def abort(self, *_: object, **__: object) -> None:
        self.aborted += 1
        raise grpc.aio.InternalError("the caller has disconnected")


async def test_refusing_a_disconnected_caller_raises_nothing() -> None:
    async def refuse(request: Any, context: Any) -> AsyncGenerator[Any]:
        raise InvalidRequest("no")
        yield

    context = Disconnected()
    responses = guarded(refuse, METHOD)(None, cast(grpc.aio.ServicerContext[Any, Any], context))
    assert [response async for response in responses] == []
    assert context.aborted == 1


async def test_closing_the_responses_ends_the_servicer_and_frees_the_quota() -> None:
    ended = False

    async def answer(requests: Any, context: Any) -> AsyncGenerator[Any]:
        nonlocal ended
        try:
            yield 1
            yield 2
        finally:
            await asyncio.sleep(0)
            ended = True

    quotas = ClientQuotas()
    responses = guarded(quotas.limited(answer), METHOD)(None, cast(grpc.aio.ServicerContext[Any, Any], Disconnected()))
    assert await anext(responses) == 1
    assert quotas.clients == 1
    await responses.aclose()
    assert ended
    assert quotas.clients == 0


async def test_a_long_error_about_a_peer_is_cut_in_the_log() -> None:
    async def broken(requests: Any, context: Any) -> AsyncGenerator[Any]:
        raise PeerContract("x" * 10**6)
        yield

    with structlog.testing.capture_logs() as logs:
        responses = guarded(broken, METHOD)(None, cast(grpc.aio.ServicerContext[Any, Any], Disconnected()))
        assert [response async for response in responses] == []
    [error] = [each["error"] for each in logs if each["event"] == "peer broke the contract"]
    assert MAX_MESSAGE_BYTES <= len(error) < MAX_MESSAGE_BYTES + 10
