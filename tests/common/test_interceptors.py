"""Requests whose caller has disconnected, and long errors of peers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
import structlog
from grpc.aio import InternalError

from common.contract.errors import FramesieveError, InvalidRequest, PeerContract
from common.security.quotas import ClientQuotas
from common.serving.interceptors import Behaviour, guarded
from common.serving.status import MAX_MESSAGE_BYTES
from tests.common.guarded_service import METHOD


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
        raise InternalError("the caller has disconnected")


def responses_of(behaviour: Behaviour, context: Any) -> AsyncGenerator[Any]:
    return guarded(behaviour, METHOD)(None, context)


@pytest.mark.parametrize("error", [InvalidRequest("no"), PeerContract("x" * 10**6)])
async def test_refusing_a_disconnected_caller_raises_nothing_and_cuts_errors_of_peers(error: FramesieveError) -> None:
    async def refuse(request: Any, context: Any) -> AsyncGenerator[Any]:
        raise error
        yield

    context = Disconnected()
    with structlog.testing.capture_logs() as logs:
        assert [response async for response in responses_of(refuse, context)] == []
    assert context.aborted == 1
    assert all(len(each.get("error", "")) < MAX_MESSAGE_BYTES + 10 for each in logs)


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
    responses = responses_of(quotas.limited(answer), Disconnected())
    assert await anext(responses) == 1
    assert quotas.clients == 1
    await responses.aclose()
    assert ended
    assert quotas.clients == 0
