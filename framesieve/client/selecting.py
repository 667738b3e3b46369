"""The calls of Preprocess and Encode, of which all is wanted."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from common.channels import check_size, end_writing, write_to
from framesieve.v1 import prompt_pb2

EVERYTHING = prompt_pb2.Select(all=True)


async def answers(call: Any, prompt: Any, select: Any) -> AsyncIterator[Any]:
    """What a call answers to a prompt and, once its plan begins, to a selection.

    Raises InvalidRequest, and writes nothing, for a prompt that is larger than any service takes.
    """
    check_size(prompt)
    await write_to(call, prompt)
    selected = False
    async for response in call:
        if not selected:
            selected = True
            await write_to(call, select)
            await end_writing(call)
        yield response
