"""Cameras: GStreamer's RTSP server in a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

_PYTHON = "/usr/bin/python3"
_PROGRAM = Path(__file__).with_name("rtsp_server.py")


@dataclass(frozen=True, slots=True)
class Camera:
    """pid: of its process. said: what it prints after its port."""

    port: int
    pid: int
    said: asyncio.StreamReader


@asynccontextmanager
async def camera(**wanted: Any) -> AsyncIterator[Camera]:
    """wanted: as `rtsp_server` takes it."""
    if not _runs():
        pytest.skip("needs GStreamer's RTSP server, see CONTRIBUTING.md")
    process = await asyncio.create_subprocess_exec(
        *(_PYTHON, str(_PROGRAM), json.dumps(wanted)), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60):
            yield Camera(int(await process.stdout.readline()), process.pid, process.stdout)
    finally:
        with suppress(ProcessLookupError):  # the test has ended it
            process.kill()
        await process.wait()


@cache
def _runs() -> bool:
    """Whether the server can be started. It must be where CI runs."""
    program = "import gi; gi.require_version('GstRtspServer', '1.0')"
    return "CI" in os.environ or subprocess.run([_PYTHON, "-c", program], stderr=subprocess.DEVNULL).returncode == 0


def played(path: Path, track: str) -> str:
    """A pipeline that plays a video file in MP4, with that track: "h264", "h265" or "jpeg"."""
    parse = "jpegparse" if track == "jpeg" else f"{track}parse config-interval=-1"
    return f"filesrc location={path} ! qtdemux ! {parse} ! rtp{track}pay name=pay0 pt={26 if track == 'jpeg' else 96}"
