"""Looking names up: by asking the system, side by side, and not for ever. Name servers that are silent are injected."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress

import pytest

from common.contract.errors import MediaRejected, Overloaded
from services.preprocessing.fetch.addresses import SystemResolver
from services.preprocessing.fetch.fetcher import MAX_CONCURRENT_FETCHES, Fetcher
from tests.preprocessing.media_server import Resolver, ok, policy, redirect, serving

V6 = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("2606::1", 0, 0, 0))
V4 = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))
TIMEOUT_S = 20.0


class NameServers:
    """In the place of the system's: who serves dead.test says nothing until `answers` is set."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.waiting = 0

    def getaddrinfo(self, host: str, *_: object, **options: object) -> Sequence[object]:
        assert options["type"] == socket.SOCK_STREAM
        if host == "dead.test":
            self.waiting += 1
            self.answers.wait(TIMEOUT_S)
            raise socket.gaierror(socket.EAI_AGAIN, "no server answers")
        return {"example.org": [V6, V4, V4], "clip.test": [V4]}[host]


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[NameServers]:
    servers = NameServers()
    monkeypatch.setattr(socket, "getaddrinfo", servers.getaddrinfo)
    yield servers
    servers.answers.set()


async def test_the_system_is_asked_for_all_addresses_of_a_name(servers: NameServers) -> None:
    assert await SystemResolver(1).look_up("example.org") == ["2606::1", "127.0.0.1"]


async def test_names_whose_servers_are_silent_keep_no_other_waiting(servers: NameServers) -> None:
    async with serving(ok()) as server:
        fetcher = Fetcher(policy(server.port, look_up_s=TIMEOUT_S))
        dead = [
            asyncio.create_task(fetcher.fetch("video", "http://dead.test/")) for _ in range(MAX_CONCURRENT_FETCHES - 1)
        ]
        async with asyncio.timeout(TIMEOUT_S):
            while servers.waiting < len(dead):
                await asyncio.sleep(0.01)
            (await fetcher.fetch("video", f"http://clip.test:{server.port}/")).close()
    assert not any(each.done() for each in dead)
    for each in dead:
        each.cancel()
    await asyncio.gather(*dead, return_exceptions=True)


async def test_look_ups_that_nobody_waits_for_any_more_are_nobody_elses_fault(servers: NameServers) -> None:
    names = SystemResolver(3)
    left = [asyncio.create_task(names.look_up("dead.test")) for _ in range(3)]
    async with asyncio.timeout(TIMEOUT_S):
        while servers.waiting < len(left):
            await asyncio.sleep(0.01)
        for each in left:
            each.cancel()
        await asyncio.wait(left)
        with pytest.raises(Overloaded, match="name cannot be looked up now: 3 lookups are running"):
            await names.look_up("clip.test")
        servers.answers.set()
        while True:
            with suppress(Overloaded):
                assert await names.look_up("clip.test") == ["127.0.0.1"]
                break
            await asyncio.sleep(0.01)
    assert await asyncio.gather(*(names.look_up("clip.test") for _ in range(3))) == [["127.0.0.1"]] * 3


async def test_a_look_up_that_takes_too_long_names_the_host_and_the_limit(servers: NameServers) -> None:
    with pytest.raises(MediaRejected) as refused:
        await Fetcher(policy(80, look_up_s=0.1)).fetch("video", "http://dead.test/")
    told = "video.url has a host whose name lookup took longer than the allowed 0.1 s: 'dead.test'"
    assert str(refused.value) == told


async def test_where_a_redirect_leads_is_not_told_when_its_look_up_takes_too_long() -> None:
    known = Resolver(clip_test=[["127.0.0.1"]])

    async def resolve(host: str) -> Sequence[str]:
        if host == "dead.test":
            await asyncio.sleep(TIMEOUT_S)
        return await known(host)

    async with serving(redirect("http://dead.test/")) as server:
        with pytest.raises(MediaRejected) as refused:
            await Fetcher(policy(server.port, look_up_s=0.1), resolve).fetch(
                "video", f"http://clip.test:{server.port}/"
            )
    told = "video.url redirects to a host whose name lookup took longer than the allowed 0.1 s"
    assert str(refused.value) == told
