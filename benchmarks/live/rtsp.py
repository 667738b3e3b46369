"""Cameras of a network: films that GStreamer's RTSP server plays, each from its beginning to everybody who asks."""

from __future__ import annotations

import asyncio
import json
from asyncio.subprocess import PIPE, Process
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# The system's Python has the bindings of GStreamer, which are no package of pip's.
PYTHON = "/usr/bin/python3"
_COMMAND = (PYTHON, str(Path(__file__).parents[2] / "tests" / "rtsp_server.py"))
_START_S = 30
_PIPELINE = "filesrc location={} ! qtdemux ! h264parse config-interval=-1 ! rtph264pay name=pay0 pt=96"


@dataclass(frozen=True, slots=True)
class Cameras:
    """A server that plays.

    pid: of its process. began_s: by the number of a film, when its first frame was due (`time.time`), each time that it
    was played.
    """

    port: int
    pid: int
    began_s: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))

    def url(self, number: int) -> str:
        return f"rtsp://127.0.0.1:{self.port}/{number}"

    @property
    def flags(self) -> list[str]:
        """Flags of a preprocessing service that may watch them."""
        return ["--allow-media-domain", "127.0.0.1=127.0.0.1/32", "--fetch-ports", str(self.port)]


@asynccontextmanager
async def playing(films: Sequence[Path]) -> AsyncIterator[Cameras]:
    """Plays MP4 files of H.264. Raises RuntimeError if the server cannot be started."""
    mounts = {f"/{number}": _PIPELINE.format(film) for number, film in enumerate(films)}
    async with server(mounts=mounts, tells=True) as (port, process, said):
        cameras = Cameras(port, process.pid)
        reading = asyncio.create_task(_read(said, cameras))
        try:
            yield cameras
        finally:
            reading.cancel()


@asynccontextmanager
async def server(**wanted: Any) -> AsyncIterator[tuple[int, Process, asyncio.StreamReader]]:
    """Its port, its process, and what it prints after its port. wanted: as `rtsp_server` takes it.

    Raises RuntimeError if it cannot be started.
    """
    process = await asyncio.create_subprocess_exec(*_COMMAND, json.dumps(wanted), stdout=PIPE)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(_START_S):
            if not (port := await process.stdout.readline()):
                raise RuntimeError("needs GStreamer's RTSP server, see CONTRIBUTING.md")
        yield int(port), process, process.stdout
    finally:
        with suppress(ProcessLookupError):  # it has ended
            process.kill()
        await process.wait()


async def _read(lines: asyncio.StreamReader, cameras: Cameras) -> None:
    async for line in lines:
        if not line.startswith(b"{"):  # of a camera that is left
            continue
        told = json.loads(line)
        cameras.began_s[int(told["path"][1:])].append(told["began_s"])
