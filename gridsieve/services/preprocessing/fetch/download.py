"""A stream that comes by HTTP: a body as it comes, or a picture that is asked for again and again.

Many small pieces are gathered, so that a server that sends its body byte by byte costs no more than one that does not.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from gridsieve.common.contract.errors import MediaRejected

_GATHER_S = 0.05
_GATHER_BYTES = 2**16
# The event loop parses pieces for the first of them, and then does something else for the second.
_TURN_S, _PAUSE_S = 0.001, 0.004

_JPEG = b"\xff\xd8\xff"
# Where a JPEG ends and another one begins.
_NEXT_JPEG = b"\xff\xd9\xff\xd8"
# A picture of nothing: it tells FFmpeg that the one before it is whole.
_NOTHING = b"\xff\xd8\xff\xd9"


@dataclass(frozen=True, slots=True)
class Download:
    """The body of an answer. media_type: its Content-Type, in lower case, without parameters."""

    media_type: str
    pieces: AsyncIterator[bytes]


async def gathered(pieces: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
    """The same bytes, in pieces of what comes within _GATHER_S, or of _GATHER_BYTES."""
    waiting = bytearray()
    came, full, room = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def read() -> None:
        clock = asyncio.get_running_loop().time
        began_s = clock()
        async for piece in pieces:
            waiting.extend(piece)
            came.set()
            if len(waiting) >= _GATHER_BYTES:
                full.set()
                room.clear()
                await room.wait()
            if clock() - began_s > _TURN_S:
                await asyncio.sleep(_PAUSE_S)
                began_s = clock()

    def end(_: asyncio.Task[None]) -> None:
        came.set()
        full.set()

    task = asyncio.create_task(read())
    task.add_done_callback(end)
    try:
        while waiting or not task.done():
            await came.wait()
            with suppress(TimeoutError):
                async with asyncio.timeout(_GATHER_S):
                    await full.wait()
            piece = bytes(waiting)
            waiting.clear()
            if not task.done():
                came.clear()
                full.clear()
            room.set()
            if piece:
                yield piece
        task.result()
    finally:
        task.cancel()
        await asyncio.wait([task])


async def watched(first: Download, ask: Callable[[], Awaitable[Download]], every_s: float) -> AsyncGenerator[bytes]:
    """The bytes of a body; if it is one JPEG, those of the next ones, too, as a stream of JPEGs.

    ask: asks for the body once more; its last answer is closed. It is called once in each interval of `every_s`, in its
    middle, so that the pictures are in intervals of their own. Not before the last picture has come.
    Raises MediaRejected for a picture of another format, and whatever `ask` raises.
    """
    clock = asyncio.get_running_loop().time
    due_s = clock() + 1.5 * every_s
    answer, asked = first, False
    while True:
        head, end, several = b"", b"", False
        async for piece in answer.pieces:
            head += piece[: 3 - len(head)]
            several |= _NEXT_JPEG in end + piece
            end = (end + piece)[-3:]
            if len(head) == 3 and head != _JPEG and (asked or answer.media_type.startswith("image/")):
                raise MediaRejected("is no JPEG, and other pictures are not fetched again and again")
            yield piece
        if head != _JPEG or several:
            return
        yield _NOTHING
        await asyncio.sleep(due_s - clock())
        due_s = max(due_s, clock()) + every_s
        answer, asked = await ask(), True
