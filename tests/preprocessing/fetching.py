"""What tests of the fetcher fetch, from a server of their own on loopback."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

from services.preprocessing.fetch.fetcher import Fetcher
from tests.preprocessing.media_server import Resolver, Server, policy


async def fetched(server: Server, resolver: Resolver | None = None, **limits: float) -> bytes:
    """What http://clip.test/clip.mp4 brings from a server on 127.0.0.1."""
    resolver = resolver or Resolver(clip_test=[["127.0.0.1"]])
    fetcher = Fetcher(policy(server.port, **limits), resolver)
    source = await fetcher.fetch("video", f"http://clip.test:{server.port}/clip.mp4?a=%2F&b")
    try:
        with source.open() as file:
            data = file.read()
        assert source.digest == hashlib.sha256(data).digest()
        assert source.name == "video"
        return data
    finally:
        source.close()


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def forever(writer: asyncio.StreamWriter, piece: bytes, every_s: float = 0.0) -> None:
    while True:
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(every_s)


def fetcher_of(server: Server, **limits: float) -> Fetcher:
    return Fetcher(policy(server.port, **limits), Resolver(clip_test=[["127.0.0.1"]]))


def url_of(server: Server, path: str = "/") -> str:
    return f"http://clip.test:{server.port}{path}"
