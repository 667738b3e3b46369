"""Watch calls that play cameras, with GStreamer's RTSP server and with servers that misbehave."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import grpc
import numpy as np
import pytest

from framesieve.common.process import free_port
from framesieve.services.preprocessing.fetch import login as logins
from framesieve.services.preprocessing.fetch.fetcher import Fetcher, Observed
from framesieve.services.preprocessing.workers import streams
from framesieve.services.preprocessing.workers.process import Fault
from tests.cameras import camera, played
from tests.certificates import Authority
from tests.preprocessing.media_server import Resolver, Server, policy, serving
from tests.preprocessing.service import Service, refused
from tests.preprocessing.test_watch import Watched, all_of, opened

pytestmark = pytest.mark.asyncio(loop_scope="module")

FPS = 25
# A track of sound, before that of the video.
SOUND = "audiotestsrc num-buffers=9 ! alawenc ! rtppcmapay name=pay0 pt=8"
LIVE = (
    "videotestsrc is-live=true pattern=ball ! video/x-raw,width=64,height=48,framerate={rate}/1 ! jpegenc ! "
    "rtpjpegpay name=pay0 pt=26"
)


def film(path: Path, codec: str, seconds: float, size_px: tuple[int, int] = (64, 96), **options: str) -> int:
    """Writes a film of noise that moves. Returns the bytes of its packets."""
    rng = np.random.default_rng(1)
    size_bytes = 0
    with av.open(str(path), "w", format="mp4") as container:
        track = container.add_stream(codec, rate=FPS, options=options)
        track.height, track.width = size_px
        track.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        track.codec_context.thread_count = 1
        for number in range(round(seconds * FPS) + 1):
            picture = rng.integers(0, 256, (*size_px, 3), np.uint8) if number < seconds * FPS else None
            frame = None if picture is None else av.VideoFrame.from_ndarray(picture, format="rgb24")
            for packet in track.encode(frame):
                size_bytes += packet.size
                container.mux(packet)
    return size_bytes


def frames_of(path: Path) -> dict[Fraction, np.ndarray[Any, Any]]:
    """All frames by their times, decoded by PyAV."""
    with av.open(str(path)) as container:
        return {frame.pts * frame.time_base: frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)}


def assert_of(watched: Watched, path: Path) -> None:
    """Each frame is the one of its time."""
    expected = frames_of(path)
    # All begins at the film's first frame, whatever time that has.
    first_s = min(expected)
    for time_s, pixels in watched.frames:
        place = min(expected, key=lambda each: abs(each - first_s - time_s))
        assert abs(place - first_s - time_s) < 0.002
        np.testing.assert_array_equal(pixels, expected[place])


@pytest.fixture
async def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@asynccontextmanager
async def watching(
    service: Service, port: int, authority: Authority | None = None, own: dict[str, logins.Login] | None = None, **limits: float
) -> AsyncIterator[tuple[Any, list[int]]]:
    """A stub of a service to which clip.test is 127.0.0.1, and the sizes of what it fetches."""
    came: list[int] = []
    tls = ssl.create_default_context(cafile=authority.path) if authority else None
    observed = Observed(came.append)
    made = Fetcher(policy(port, **limits), Resolver(clip_test=[["127.0.0.1"]]), tls, observed, own)
    async with service.serving(fetcher=made) as stub:
        yield stub, came


@pytest.mark.parametrize(
    ("codec", "track", "seconds", "options"),
    [
        # 4 Mbit/s: FFmpeg answers every 280,000 bytes.
        ("libx264", "h264", 6, {"bf": "2", "b": "4000000", "minrate": "4000000", "maxrate": "4000000", "bufsize": "400000"}),
        ("libx265", "h265", 3, {"x265-params": "log-level=none:bframes=2:pools=none:frame-threads=1"}),
        ("mjpeg", "jpeg", 3, {"huffman": "default"}),
    ],
)
async def test_a_film_is_played_to_its_end(
    service: Service, tmp_path: Path, codec: str, track: str, seconds: float, options: dict[str, str]
) -> None:
    path = tmp_path / "film.mp4"
    size_bytes = film(path, codec, seconds, (240, 320) if codec == "libx264" else (64, 96), **options)
    video = played(path, track).replace("pay0", "pay1")
    async with camera(mounts={"/film": f"{SOUND} {video}"}) as server, watching(service, server.port) as (stub, came):
        watched = await all_of(await opened(stub, f"rtsp://clip.test:{server.port}/film"))
        assert_of(watched, path)
        times_s = [time_s for time_s, _ in watched.frames]
        assert seconds - 1 < times_s[-1] < seconds
        assert all(after - before == pytest.approx(0.5, abs=0.05) for before, after in zip(times_s[1:], times_s[2:]))
        if codec == "libx264":
            assert size_bytes > 2_500_000
        assert sum(came) > 0.9 * size_bytes
