"""The fetcher over real sockets on loopback: whole bodies, limits of time, size and disk, and fetches side by side."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import ExitStack

import pytest

from gridsieve.common.contract.errors import MediaRejected, Overloaded
from gridsieve.services.preprocessing.fetch.fetcher import MAX_CONCURRENT_FETCHES
from tests.preprocessing.media_server import (
    BODY,
    Resolver,
    fetched,
    fetcher_of,
    forever,
    head,
    ok,
    redirect,
    serving,
    url_of,
)
from tests.preprocessing.worker_jobs import no_descriptor_left, open_descriptors, until

CHUNKED = head(200, "Transfer-Encoding: chunked")


async def test_a_body_arrives_whole_and_the_request_has_only_necessary_headers() -> None:
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
        CHUNKED + b"40000;x=y\r\n" + BODY + b"\r\n0\r\nTrailer: x\r\n\r\n",
        head(100) + head(103, "Link: </a>") + ok(),
        ok(BODY, "Content-Encoding: Identity"),
        ok() + b"more than Content-Length says",
    ],
    ids=["no length", "chunked", "informational answers first", "identity", "more than its length"],
)
async def test_a_body_of_exactly_the_limit_ends_where_http_says(answer: bytes) -> None:
    async with serving(answer) as server:
        assert await fetched(server, max_bytes=len(BODY)) == BODY


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (head(404, "Content-Length: 0"), "status 404"),
        (head(206, "Content-Length: 1") + b"a", "status 206"),
        (head(302, "Content-Length: 0"), "status 302"),
        (ok(b""), "is empty"),
        (ok(BODY, "Content-Encoding: gzip"), "Content-Encoding 'gzip'"),
        (ok(BODY, "Content-Encoding: identity, br"), "Content-Encoding 'identity, br'"),
        (head(200, "Content-Length: 5") + b"1234", "broke off"),
        (head(200, "Content-Length: 5", "Content-Length: 6") + b"123456", "broke off"),
        (CHUNKED + b"3\r\nabc\r\n", "broke off"),
        (head(200, "X: " + "a" * 200_000), "broke off"),
        (b"\0\1\2 no http at all\r\n\r\n", "broke off"),
        (b"", "broke off"),
    ],
)
async def test_an_incomplete_or_encoded_body_is_rejected(answer: bytes, why: str) -> None:
    async with serving(answer) as server:
        with pytest.raises(MediaRejected, match=rf"^video\.url .*{why}"):
            await fetched(server)


async def test_a_declared_length_above_the_limit_is_refused_before_the_body_arrives() -> None:
    async def only_a_head(writer: asyncio.StreamWriter) -> None:
        writer.write(head(200, f"Content-Length: {len(BODY)}"))
        await asyncio.sleep(60)

    async with serving(only_a_head) as server, asyncio.timeout(30):
        with pytest.raises(MediaRejected, match=f"more than the {len(BODY) - 1} bytes"):
            await fetched(server, max_bytes=len(BODY) - 1, total_s=60.0)


@pytest.mark.parametrize(
    ("start", "piece"),
    [(b"", b""), (b"HTTP/1.1 200 X\r\nX: ", b"a"), (b"", head(100)), (CHUNKED, b"1\r\na\r\n")],
    ids=["silent", "header", "informational answers", "chunks"],
)
async def test_a_slow_server_is_abandoned_when_the_time_is_up(start: bytes, piece: bytes) -> None:
    async def drip(writer: asyncio.StreamWriter) -> None:
        writer.write(start)
        await forever(writer, piece, every_s=0.02)

    before, start_s = open_descriptors(), time.perf_counter()
    async with serving(drip) as server:
        with pytest.raises(MediaRejected, match=r"^video\.url (took longer than the allowed 0\.4 s|could not be)"):
            await fetched(server, total_s=0.4)
        assert time.perf_counter() - start_s < 20
    await until(lambda: open_descriptors() <= before)


async def test_the_time_limit_includes_redirects() -> None:
    async def slowly_elsewhere(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.2)
        writer.write(redirect("/again"))

    async with serving(slowly_elsewhere) as server:
        with pytest.raises(MediaRejected, match=r"longer than the allowed 0\.5 s"):
            await fetched(server, total_s=0.5, max_redirects=100)


async def test_a_failed_fetch_cancels_the_others_and_closes_everything() -> None:
    brought = asyncio.Event()

    async def by_path(writer: asyncio.StreamWriter) -> None:
        path = server.requests[-1].split(" ")[1]
        if path == "/brought":
            writer.write(ok())
            return brought.set()
        if path == "/drips":
            writer.write(head(200))
            await forever(writer, b"a", every_s=0.01)
        await brought.wait()
        await asyncio.sleep(0.1)
        return writer.write(head(404, "Content-Length: 0"))

    before = open_descriptors()
    async with serving(by_path) as server:
        urls = {name: url_of(server, f"/{name}") for name in ("brought", "drips", "gone")}
        with pytest.raises(MediaRejected, match=r"^gone\.url was answered with status 404"):
            await fetcher_of(server).fetch_all(urls)
    assert brought.is_set()
    await until(lambda: open_descriptors() <= before)


async def test_concurrent_fetches_are_limited() -> None:
    enough = asyncio.Event()

    async def when_told(writer: asyncio.StreamWriter) -> None:
        await enough.wait()
        writer.write(ok(b"a"))

    async with serving(when_told) as server:
        urls = {str(number): url_of(server) for number in range(MAX_CONCURRENT_FETCHES + 3)}
        fetching = asyncio.create_task(fetcher_of(server).fetch_all(urls))
        await until(lambda: server.connections >= MAX_CONCURRENT_FETCHES)
        await asyncio.sleep(0.1)
        assert server.connections == MAX_CONCURRENT_FETCHES
        enough.set()
        for source in (await fetching).values():
            source.close()


async def test_files_share_the_disk_budget_until_they_are_closed() -> None:
    async with serving(ok()) as server:
        fetcher = fetcher_of(server, max_bytes=len(BODY), disk_bytes=2 * len(BODY) - 1)
        first = await fetcher.fetch("first", url_of(server))
        with pytest.raises(
            Overloaded, match=rf"^second\.url does not fit now: --fetch-disk-bytes is {2 * len(BODY) - 1}"
        ):
            await fetcher.fetch("second", url_of(server))
        first.close()
        (await fetcher.fetch("second", url_of(server))).close()


async def test_a_cancelled_fetch_releases_its_connection_its_file_and_its_disk_budget() -> None:
    sent = asyncio.Event()

    async def half(writer: asyncio.StreamWriter) -> None:
        writer.write(head(200, f"Content-Length: {len(BODY)}") + BODY[:-1])
        await writer.drain()
        sent.set()
        await asyncio.sleep(60)

    before = open_descriptors()
    async with serving(half) as server:
        fetcher = fetcher_of(server, disk_bytes=len(BODY), max_bytes=len(BODY))
        fetching = asyncio.create_task(fetcher.fetch("video", url_of(server)))
        await sent.wait()
        await asyncio.sleep(0.1)
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching
        server.answer = ok()
        (await fetcher.fetch("video", url_of(server))).close()
    await until(lambda: open_descriptors() <= before)


async def test_a_fetch_without_free_descriptors_is_overloaded() -> None:
    with ExitStack() as shortage:

        class Exhausting(Resolver):
            async def __call__(self, host: str) -> Sequence[str]:
                shortage.enter_context(no_descriptor_left())
                return await super().__call__(host)

        async with serving(ok()) as server:
            with pytest.raises(Overloaded, match=r"^video\.url cannot be opened now: Too many open files"):
                await fetched(server, Exhausting(clip_test=[["127.0.0.1"]]))
    assert server.connections == 0
