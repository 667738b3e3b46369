"""What is left of a request when nobody is there to be told of its end."""

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


class Left:
    """The context of a call whose caller left at this very moment."""

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
        raise grpc.aio.InternalError("nobody is there")


async def test_who_left_before_being_refused_is_no_failure_of_ours() -> None:
    async def refuse(request: Any, context: Any) -> AsyncGenerator[Any]:
        raise InvalidRequest("no")
        yield

    context = Left()
    responses = guarded(refuse, METHOD)(None, cast(grpc.aio.ServicerContext[Any, Any], context))
    assert [response async for response in responses] == []
    assert context.aborted == 1


async def test_what_answered_has_ended_once_its_answer_is_closed() -> None:
    ended = False

    async def answer(requests: Any, context: Any) -> AsyncGenerator[Any]:
        nonlocal ended
        try:
            yield 1
            yield 2
        finally:
            await asyncio.sleep(0)
            ended = True

    budgets = ClientQuotas()
    responses = guarded(budgets.limited(answer), METHOD)(None, cast(grpc.aio.ServicerContext[Any, Any], Left()))
    assert await anext(responses) == 1
    assert budgets.clients == 1
    await responses.aclose()
    assert ended
    assert budgets.clients == 0


async def test_what_a_peer_broke_is_logged_up_to_a_limit() -> None:
    async def broken(requests: Any, context: Any) -> AsyncGenerator[Any]:
        raise PeerContract("x" * 10**6)
        yield

    with structlog.testing.capture_logs() as logs:
        responses = guarded(broken, METHOD)(None, cast(grpc.aio.ServicerContext[Any, Any], Left()))
        assert [response async for response in responses] == []
    [error] = [each["error"] for each in logs if each["event"] == "peer broke the contract"]
    assert MAX_MESSAGE_BYTES <= len(error) < MAX_MESSAGE_BYTES + 10
