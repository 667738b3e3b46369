"""Events to standard output, a line of JSON each."""

from __future__ import annotations

import asyncio
import select
import sys

from gridsieve.watch.outbox import Letter


class StdoutSender:
    """A reader that does not read holds up events, and no camera."""

    name = "stdout"

    def __init__(self) -> None:
        self._file = sys.stdout.buffer
        self._turn = asyncio.Lock()

    async def deliver(self, letter: Letter) -> None:
        line = letter.body + b"\n"
        async with self._turn:
            for start in range(0, len(line), select.PIPE_BUF):  # so much a pipe takes at once when it has room
                await self._has_room()
                self._file.write(line[start : start + select.PIPE_BUF])
                self._file.flush()

    async def close(self) -> None:
        pass

    async def _has_room(self) -> None:
        loop, room = asyncio.get_running_loop(), asyncio.Event()
        try:
            loop.add_writer(self._file, room.set)
        except PermissionError:  # a file has it always
            return
        try:
            await room.wait()
        finally:
            loop.remove_writer(self._file)
