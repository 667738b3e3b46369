"""What is left of a refusal when nobody is there to be told."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, cast

import grpc

from common.errors import InvalidRequest
from common.interceptors import guarded


class Left:
    """The context of a call whose caller left at this very moment."""

    aborted = 0

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    async def abort(self, *_: object, **__: object) -> None:
        self.aborted += 1
        raise grpc.aio.InternalError("nobody is there")


async def test_who_left_before_being_refused_is_no_failure_of_ours() -> None:
    async def refuse(request: Any, context: Any) -> AsyncIterator[Any]:
        raise InvalidRequest("no")
        yield

    context = Left()
    responses = guarded(refuse, "/framesieve.v1.EncoderService/Encode")(
        None, cast(grpc.aio.ServicerContext[Any, Any], context)
    )
    assert [response async for response in responses] == []
    assert context.aborted == 1
