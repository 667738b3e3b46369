"""RTSP sessions with servers that misbehave."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from ipaddress import ip_address

import pytest

from framesieve.common.contract.errors import MediaRejected
from framesieve.services.preprocessing.fetch.rtsp import playing
from framesieve.services.preprocessing.fetch.urls import parse_url

SDP = b"v=0\r\nm=video 0 RTP/AVP 96\r\na=rtpmap:96 H264/90000\r\n"
ANSWERS = (
    b"Content-Length: %d\r\n\r\n%b" % (len(SDP), SDP),
    b"Session: 7\r\nTransport: RTP/AVP/TCP;interleaved=0-1\r\n\r\n",
    b"Session: 7\r\n\r\n",
)


async def test_a_camera_that_answers_and_sends_no_video_is_silent() -> None:
    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for number, answer in enumerate(ANSWERS, 1):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"RTSP/1.0 200 OK\r\nCSeq: %d\r\n%b" % (number, answer))
        writer.write(b"$\0\0\1a")
        while not writer.is_closing():
            writer.write(b"RTSP/1.0 200 OK\r\nCSeq: 4\r\n\r\n$\1\0\1b")
            await asyncio.sleep(0.05)
        with suppress(OSError):
            await writer.wait_closed()
        ended.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = parse_url(f"rtsp://camera.test:{server.sockets[0].getsockname()[1]}/", ["rtsp"])
    addresses = [ip_address("127.0.0.1")]
    async with server, asyncio.timeout(20):
        async with playing(url, addresses, connect_s=5, silent_s=0.5) as played:
            assert (await anext(played)).startswith(b"v=0")
            assert await anext(played) == b"\0\1a"
            with pytest.raises(MediaRejected, match=r"has sent no video for 0\.5 s"):
                await anext(played)
        await ended.wait()
