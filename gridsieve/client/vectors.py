"""What models that read prompts give: a vector of a prompt, a score of a document for a query."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from gridsieve.client.answer import Usage
from gridsieve.client.prompt import Part, Text, media_of

# Calls of one caller that run at once: the service computes them together, and keeps its queue for others.
AT_ONCE = 32

Content: TypeAlias = str | os.PathLike[str] | Part | Sequence[str | os.PathLike[str] | Part]
"""Of a query or a document: text as a string, media as a Path, a Video or an Image, or a sequence of these."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Embedding:
    """values: float32 [D], of length 1."""

    values: NDArray[np.float32]
    request_id: str
    usage: Usage


@dataclass(frozen=True, slots=True)
class Score:
    """score: how well a document answers a query, 0 to 1."""

    score: float
    request_id: str
    usage: Usage


def parts_of(content: Content) -> tuple[Part, ...]:
    each = (content,) if isinstance(content, (str, os.PathLike, Part)) else content
    return tuple(Text(one) if isinstance(one, str) else one if isinstance(one, Part) else media_of(one) for one in each)


async def together(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results in order, of AT_ONCE calls at a time. The first error ends the others."""
    room = asyncio.Semaphore(AT_ONCE)

    async def within_room(call: Coroutine[Any, Any, T]) -> T:
        async with room:
            return await call

    tasks = [asyncio.ensure_future(within_room(call)) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
