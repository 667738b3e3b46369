"""The calls of Preprocess and Encode, of which all is wanted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from common.channels import check_size, write_on
from framesieve.v1 import prompt_pb2

EVERYTHING = prompt_pb2.Select(all=True)


async def answers(call: Any, prompt: Any, select: Any) -> AsyncIterator[Any]:
    """What a call answers to a prompt and, once its plan begins, to a selection.

    Raises InvalidRequest, and writes nothing, for a prompt that is larger than any service takes.
    """
    check_size(prompt)
    await call.write(prompt)
    selected = False
    async for response in call:
        if not selected:
            selected = True
            await write_on(call, select)
            with suppress(asyncio.InvalidStateError):  # it has ended; reading tells how
                await call.done_writing()
        yield response
