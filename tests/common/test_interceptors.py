"""Requests whose caller has disconnected, and long errors of peers."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import pytest
import structlog
from grpc.aio import InternalError

from gridsieve.common.contract.errors import GridsieveError, InvalidRequest, PeerContract
from gridsieve.common.serving.interceptors import guarded
from gridsieve.common.serving.status import MAX_MESSAGE_BYTES
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


@pytest.mark.parametrize("error", [InvalidRequest("no"), PeerContract("x" * 10**6)])
async def test_refusing_a_disconnected_caller_raises_nothing_and_cuts_errors_of_peers(error: GridsieveError) -> None:
    async def refuse(request: Any, context: Any) -> AsyncGenerator[Any]:
        raise error
        yield

    context: Any = Disconnected()
    with structlog.testing.capture_logs() as logs:
        assert [response async for response in guarded(refuse, METHOD)(None, context)] == []
    assert context.aborted == 1
    assert all(len(each.get("error", "")) < MAX_MESSAGE_BYTES + 10 for each in logs)
