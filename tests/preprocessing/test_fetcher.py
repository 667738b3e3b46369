"""The fetcher over real sockets on loopback: which bodies it brings whole, and when it stops waiting for one.

Names resolve through a resolver of the test's own. Loopback is opened as an operator would open it: by a domain with
its network.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from common.contract.errors import MediaRejected
from services.preprocessing.fetch.fetcher import Fetcher
from tests.preprocessing.fetching import fetched, forever, open_files
from tests.preprocessing.media_server import BODY, Resolver, head, ok, policy, redirect, serving

pytest_plugins = ["tests.preprocessing.fixtures"]
pytestmark = pytest.mark.usefixtures("no_name_is_looked_up")


async def test_a_body_arrives_whole_and_the_request_says_no_more_than_it_must() -> None:
    async with serving(ok()) as server:
        assert await fetched(server) == BODY
    request, *headers = server.requests[0].rstrip().split("\r\n")
    assert request == "GET /clip.mp4?a=%2F&b HTTP/1.1"
    given = dict(header.lower().split(": ", 1) for header in headers)
    assert given.pop("host") == f"clip.test:{server.port}"
    assert given.pop("accept-encoding") == "identity"
    assert given.keys() <= {"user-agent", "accept", "connection"}


@pytest.mark.parametrize(
    "answer",
    [
        head(200) + BODY,
        head(200, "Transfer-Encoding: chunked") + b"40000;x=y\r\n" + BODY + b"\r\n0\r\nTrailer: x\r\n\r\n",
        head(100) + head(103, "Link: </a>") + ok(),
        ok(BODY, f"Content-Length: {len(BODY)}", "Content-Encoding: Identity"),
        ok() + b"more than Content-Length says",
    ],
    ids=["no length", "chunked", "informational answers first", "its length twice", "more than its length"],
)
async def test_a_body_ends_where_http_says(answer: bytes) -> None:
    async with serving(answer) as server:
        assert await fetched(server) == BODY


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (head(404, "Content-Length: 0"), "status 404"),
        (head(206, "Content-Length: 1") + b"a", "status 206"),
        (head(204), "status 204"),
        (head(304), "status 304"),
        (head(101, "Connection: upgrade", "Upgrade: x"), "broke off"),
        (head(302, "Content-Length: 0"), "status 302"),
        (ok(b""), "is empty"),
        (ok(BODY, "Content-Encoding: gzip"), "Content-Encoding 'gzip'"),
        (ok(BODY, "Content-Encoding: identity, br"), "Content-Encoding 'identity, br'"),
        (head(200, "Transfer-Encoding: gzip, chunked") + b"0\r\n\r\n", "broke off"),
        (head(200, "Content-Length: 5") + b"1234", "broke off"),
        (head(200, "Content-Length: 5", "Content-Length: 6") + b"123456", "broke off"),
        (head(200, "Content-Length: -1") + b"1", "broke off"),
        (head(200, "Content-Length: " + "9" * 5000), "broke off"),
        (head(200, "Transfer-Encoding: chunked") + b"3\r\nabc\r\n", "broke off"),
        (head(200, "Transfer-Encoding: chunked") + b"-1\r\nabc\r\n0\r\n\r\n", "broke off"),
        (head(200, "X: " + "a" * 200_000), "broke off"),
        (b"\0\1\2 no http at all\r\n\r\n", "broke off"),
        (b"", "broke off"),
    ],
)
async def test_what_is_no_whole_plain_body_is_rejected(answer: bytes, why: str) -> None:
    async with serving(answer) as server:
        with pytest.raises(MediaRejected, match=rf"^video\.url .*{why}"):
            await fetched(server)


async def test_a_body_smaller_than_any_buffer_arrives_too() -> None:
    async with serving(ok(b"clip")) as server:
        assert await fetched(server) == b"clip"


@pytest.mark.parametrize("length", [f"Content-Length: {len(BODY)}", f"Content-Length: {10**19}"])
async def test_a_length_above_the_limit_is_refused_before_the_body_is_sent(length: str) -> None:
    async def only_a_head(writer: asyncio.StreamWriter) -> None:
        writer.write(head(200, length))
        await asyncio.sleep(60)

    async with serving(only_a_head) as server:
        start = time.perf_counter()
        with pytest.raises(MediaRejected, match=f"more than the {len(BODY) - 1} bytes"):
            await fetched(server, max_bytes=len(BODY) - 1)
        assert time.perf_counter() - start < 30


@pytest.mark.parametrize(
    ("start", "piece"),
    [(head(200), bytes(65536)), (head(200, "Transfer-Encoding: chunked"), b"10000\r\n" + bytes(65536) + b"\r\n")],
    ids=["no length", "chunked"],
)
async def test_bytes_are_counted_whatever_is_said_of_them(start: bytes, piece: bytes) -> None:
    async def endless(writer: asyncio.StreamWriter) -> None:
        writer.write(start)
        await forever(writer, piece)

    async with serving(endless) as server:
        with pytest.raises(MediaRejected, match="more than the 1000000 bytes"):
            await fetched(server, max_bytes=1_000_000)


async def test_exactly_the_limit_is_let_through() -> None:
    async with serving(ok()) as server:
        assert await fetched(server, max_bytes=len(BODY)) == BODY


@pytest.mark.parametrize(
    ("start", "piece"),
    [
        (b"", b""),
        (b"", b"HTTP/1.1 200 X\r\n"[:1]),
        (b"HTTP/1.1 200 X\r\nX: ", b"a"),
        (b"", head(100)),
        (head(200, "Content-Length: 1000"), b"a"),
        (head(200, "Transfer-Encoding: chunked"), b"1\r\na\r\n"),
        (head(200, "Transfer-Encoding: chunked") + b"1;", b"x"),
    ],
    ids=["silent", "status line", "header", "informational answers", "body", "chunks", "chunk extension"],
)
async def test_a_server_that_drips_is_left_when_the_time_is_up(start: bytes, piece: bytes) -> None:
    async def drip(writer: asyncio.StreamWriter) -> None:
        writer.write(start)
        await forever(writer, piece, every_s=0.02)

    before, start_s = open_files(), time.perf_counter()
    async with serving(drip) as server:
        with pytest.raises(
            MediaRejected, match=r"^video\.url (took longer than the allowed 0\.4 s|could not be fetched)"
        ):
            await fetched(server, total_s=0.4)
        assert time.perf_counter() - start_s < 20
    await asyncio.sleep(0)  # in which asyncio closes what the server aborted
    assert open_files() <= before


async def test_the_time_holds_over_redirects_and_look_ups() -> None:
    async def slowly_elsewhere(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.2)
        writer.write(redirect("/again"))

    async def slow(host: str) -> Sequence[str]:
        await asyncio.sleep(60)
        return ["127.0.0.1"]

    async with serving(slowly_elsewhere) as server:
        with pytest.raises(MediaRejected, match=r"longer than the allowed 0\.5 s"):
            await fetched(server, total_s=0.5, max_redirects=100)
    with pytest.raises(MediaRejected, match=r"longer than the allowed 0\.1 s"):
        await Fetcher(policy(80, total_s=0.1), slow).fetch("video", "http://clip.test/")


async def test_whoever_is_cancelled_leaves_no_connection_and_no_file() -> None:
    async def endless(writer: asyncio.StreamWriter) -> None:
        writer.write(head(200))
        await forever(writer, b"a", every_s=0.01)

    before = open_files()
    async with serving(endless) as server:
        fetching = asyncio.create_task(fetched(server))
        while not server.requests:
            await asyncio.sleep(0.01)
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching
    await asyncio.sleep(0)
    assert open_files() <= before


async def test_a_file_that_was_fetched_has_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    async with serving(ok()) as server:
        source = await Fetcher(policy(server.port), Resolver(clip_test=[["127.0.0.1"]])).fetch(
            "video", f"http://clip.test:{server.port}/"
        )
        assert not list(tmp_path.iterdir())
        source.close()
