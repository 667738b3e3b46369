"""Fetches side by side, and what they share: the disk, descriptors, and how many may run."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
from collections.abc import Sequence

import pytest

from common.contract.errors import MediaRejected, Overloaded
from services.preprocessing.fetch.fetcher import MAX_CONCURRENT_FETCHES, Fetcher
from tests.preprocessing.fetching import fetched, fetcher_of, forever, open_files, url_of
from tests.preprocessing.media_server import BODY, Resolver, head, ok, policy, serving

pytest_plugins = ["tests.preprocessing.fixtures"]
pytestmark = pytest.mark.usefixtures("no_name_is_looked_up")


async def test_all_are_fetched_side_by_side_and_each_is_named() -> None:
    together = asyncio.Event()

    async def when_all_have_asked(writer: asyncio.StreamWriter) -> None:
        path = server.requests[-1].split(" ")[1]
        if len(server.requests) == 3:
            together.set()
        await together.wait()
        writer.write(ok(path.encode()))

    async with serving(when_all_have_asked) as server:
        fetched = await fetcher_of(server).fetch_all({name: url_of(server, f"/{name}") for name in "abc"})
    for name, source in fetched.items():
        with source.open() as file:
            assert (source.name, file.read()) == (name, f"/{name}".encode())
        source.close()
    assert list(fetched) == list("abc")


async def test_one_that_fails_ends_the_others_and_leaves_nothing_open() -> None:
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

    before = open_files()
    async with serving(by_path) as server:
        with pytest.raises(MediaRejected, match=r"^gone\.url was answered with status 404"):
            await fetcher_of(server).fetch_all(
                {name: url_of(server, f"/{name}") for name in ("brought", "drips", "gone")}
            )
    await asyncio.sleep(0)
    assert brought.is_set()
    assert open_files() <= before


async def test_no_more_than_so_many_run_at_once_and_the_next_starts_when_one_ends() -> None:
    enough = asyncio.Event()

    async def when_told(writer: asyncio.StreamWriter) -> None:
        await enough.wait()
        writer.write(ok(b"a"))

    async with serving(when_told) as server:
        urls = {str(number): url_of(server) for number in range(MAX_CONCURRENT_FETCHES + 3)}
        fetching = asyncio.create_task(fetcher_of(server).fetch_all(urls))
        while server.connections < MAX_CONCURRENT_FETCHES:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        assert server.connections == MAX_CONCURRENT_FETCHES
        enough.set()
        for source in (await fetching).values():
            source.close()
    assert server.connections == MAX_CONCURRENT_FETCHES + 3


async def test_files_share_the_disk_and_give_it_back_when_they_are_closed() -> None:
    async with serving(ok()) as server:
        fetcher = fetcher_of(server, max_bytes=len(BODY), disk_bytes=2 * len(BODY) - 1)
        first = await fetcher.fetch("first", url_of(server))
        for _ in range(3):
            with pytest.raises(Overloaded, match=rf"^second\.url finds no room: .* {2 * len(BODY) - 1} bytes together"):
                await fetcher.fetch("second", url_of(server))
        first.close()
        (await fetcher.fetch("second", url_of(server))).close()


async def test_whoever_is_cancelled_gives_its_disk_back() -> None:
    sent = asyncio.Event()

    async def half(writer: asyncio.StreamWriter) -> None:
        writer.write(head(200, f"Content-Length: {len(BODY)}") + BODY[:-1])
        await writer.drain()
        sent.set()
        await asyncio.sleep(60)

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


@pytest.mark.parametrize("lack", [errno.ENOSPC, errno.EDQUOT])
async def test_a_disk_that_is_full_is_no_fault_of_the_media(monkeypatch: pytest.MonkeyPatch, lack: int) -> None:
    class FullDisk:
        def write(self, piece: bytes) -> int:
            raise OSError(lack, os.strerror(lack))

        def close(self) -> None:
            pass

    monkeypatch.setattr("tempfile.TemporaryFile", lambda **_: FullDisk())
    async with serving(ok()) as server:
        with pytest.raises(Overloaded, match=rf"^video\.url cannot be opened now: {os.strerror(lack)}$"):
            await fetched(server)


async def test_a_look_up_that_finds_no_free_descriptor_says_nothing_of_the_host() -> None:
    async def lacking(host: str) -> Sequence[str]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with pytest.raises(Overloaded, match=r"^video\.url cannot be opened now: Too many open files"):
        await Fetcher(policy(80), lacking).fetch("video", "http://clip.test/")


@pytest.mark.parametrize("at", ["its file", "its connection"])
async def test_a_service_without_a_free_descriptor_is_overloaded(at: str) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    class Exhausting(Resolver):
        async def __call__(self, host: str) -> Sequence[str]:
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
            return await super().__call__(host)

    async with serving(ok()) as server:
        fetcher = Fetcher(policy(server.port), Exhausting(clip_test=[["127.0.0.1"]]))
        if at == "its file":
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        try:
            with pytest.raises(Overloaded, match=r"^video\.url cannot be opened now: Too many open files"):
                await fetcher.fetch("video", url_of(server))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert server.connections == 0
