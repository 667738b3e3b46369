"""Cameras: GStreamer's RTSP server in a process of its own."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.live.rtsp import PYTHON, server


@dataclass(frozen=True, slots=True)
class Camera:
    """pid: of its process. said: what it prints after its port."""

    port: int
    pid: int
    said: asyncio.StreamReader


@asynccontextmanager
async def camera(lasts_s: float = 60, **wanted: Any) -> AsyncIterator[Camera]:
    """lasts_s: raises TimeoutError after it. wanted: as `rtsp_server` takes it."""
    if not _runs():
        pytest.skip("needs GStreamer's RTSP server, see CONTRIBUTING.md")
    async with server(**wanted) as (port, process, said), asyncio.timeout(lasts_s):
        yield Camera(port, process.pid, said)


@cache
def _runs() -> bool:
    """Whether the server can be started. It must be where CI runs."""
    program = "import gi; gi.require_version('GstRtspServer', '1.0')"
    return "CI" in os.environ or subprocess.run([PYTHON, "-c", program], stderr=subprocess.DEVNULL).returncode == 0


def played(path: Path, track: str) -> str:
    """A pipeline that plays a video file in MP4, with that track: "h264", "h265" or "jpeg"."""
    parse = "jpegparse" if track == "jpeg" else f"{track}parse config-interval=-1"
    return f"filesrc location={path} ! qtdemux ! {parse} ! rtp{track}pay name=pay0 pt={26 if track == 'jpeg' else 96}"
