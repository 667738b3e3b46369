"""HTTP servers on loopback that send exact bytes or a camera's pictures, a fake resolver, and fetches from them."""

from __future__ import annotations

import asyncio
import hashlib
import io
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image

from gridsieve.services.preprocessing.fetch.fetcher import Fetcher
from gridsieve.services.preprocessing.fetch.policy import AllowedDomain, FetchPolicy
from tests.preprocessing.worker_jobs import open_paths

MULTIPART = "Content-Type: multipart/x-mixed-replace;boundary=next"
BODY = bytes(range(256)) * 1024
Behaviour = Callable[[asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Server:
    """Answers every request with `answer`, one a connection."""

    answer: bytes | Behaviour
    port: int = 0
    connections: int = 0
    requests: list[str] = field(default_factory=list)
    serving: set[asyncio.Task[None]] = field(default_factory=set)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self.serving.add(task)
        try:
            self.requests.append((await reader.readuntil(b"\r\n\r\n")).decode())
            if isinstance(self.answer, bytes):
                writer.write(self.answer)
                await writer.drain()
            else:
                await self.answer(writer)
            writer.close()
            await writer.wait_closed()
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the fetcher closed the connection, or the test is over
        finally:
            writer.transport.abort()


@asynccontextmanager
async def serving(
    answer: bytes | Behaviour, address: str = "127.0.0.1", port: int = 0, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Server]:
    server = Server(answer)
    listening = await asyncio.start_server(server.serve, address, port, ssl=tls)
    server.port = listening.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listening.close()
        for task in server.serving:
            task.cancel()
        await asyncio.gather(*server.serving, return_exceptions=True)


def fetched_files(folder: Path, process: int | str = "self") -> int:
    """Unnamed files that a process has open in a folder."""
    names = map(str, open_paths(process))
    return sum(name.startswith(f"{folder}/") and name.endswith("(deleted)") for name in names)


class Resolver:
    """Resolves these names. If a name has several answers, each lookup takes the next one, and the last one stays."""

    def __init__(self, **answers: list[list[str]]) -> None:
        self.answers = {name.replace("_", "."): answer for name, answer in answers.items()}
        self.asked: list[str] = []

    async def __call__(self, host: str) -> Sequence[str]:
        self.asked.append(host)
        answers = self.answers.get(host)
        if answers is None:
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        return answers.pop(0) if len(answers) > 1 else answers[0]


def policy(port: int, *domains: str, **limits: float) -> FetchPolicy:
    """A policy that opens 127.0.0.1 to clip.test only, unless other domains are given."""
    allowed = tuple(AllowedDomain.parse(each) for each in domains or ("clip.test=127.0.0.1", "*"))
    return FetchPolicy(ports=frozenset({port, 80}), domains=allowed, **{"total_s": 20.0, **limits})  # type: ignore[arg-type]


def ok(body: bytes = BODY, *headers: str) -> bytes:
    return head(200, f"Content-Length: {len(body)}", *headers) + body


def head(status: int, *headers: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status} X", *headers, "", ""]).encode()


def redirect(location: str, status: int = 302) -> bytes:
    return head(status, f"Location: {location}", "Content-Length: 0", "Set-Cookie: a=b")


def url_of(server: Server, path: str = "/") -> str:
    return f"http://clip.test:{server.port}{path}"


def fetcher_of(server: Server, resolver: Resolver | None = None, **limits: float) -> Fetcher:
    return Fetcher(policy(server.port, **limits), resolver or Resolver(clip_test=[["127.0.0.1"]]))


async def fetched(server: Server, resolver: Resolver | None = None, **limits: float) -> bytes:
    """The body of http://clip.test/clip.mp4 on a server at 127.0.0.1."""
    source = await fetcher_of(server, resolver, **limits).fetch("video", url_of(server, "/clip.mp4?a=%2F&b"))
    with closing(source), source.open() as file:
        data = file.read()
    assert source.digest == hashlib.sha256(data).digest()
    assert source.name == "video"
    return data


def jpeg(number: int) -> bytes:
    """A picture of a camera, grey of the level 20 + 10 · number, which holds a smaller one."""
    file, small = io.BytesIO(), io.BytesIO()
    Image.new("L", (8, 8)).save(small, "JPEG")
    Image.new("RGB", (64, 48), (20 + 10 * (number % 20),) * 3).save(file, "JPEG", comment=small.getvalue())
    return file.getvalue()


def part_of(picture: bytes) -> bytes:
    """A JPEG as a part of MULTIPART."""
    return b"--next\r\nContent-Type: image/jpeg\r\nContent-Length: %d\r\n\r\n%b\r\n" % (len(picture), picture)


async def forever(writer: asyncio.StreamWriter, piece: bytes, every_s: float = 0.0) -> None:
    while True:
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(every_s)
