"""The fetcher never connects to a forbidden target: redirects, disguised addresses, DNS rebinding, TLS, slow lookups.

A canary is a server that must receive no connection.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest
import trustme

from gridsieve.common.contract.errors import GridsieveError, InvalidRequest, MediaForbidden, MediaRejected, Overloaded
from gridsieve.services.preprocessing.fetch.addresses import SystemResolver
from gridsieve.services.preprocessing.fetch.fetcher import Fetcher
from gridsieve.services.preprocessing.fetch.policy import AllowedDomain, FetchPolicy
from tests.preprocessing.media_server import (
    BODY,
    Behaviour,
    Resolver,
    Server,
    fetched,
    head,
    ok,
    policy,
    redirect,
    serving,
    url_of,
)
from tests.preprocessing.worker_jobs import until


@pytest.mark.parametrize(
    ("status", "location", "target"),
    [
        (301, "there", "/there"),
        (303, "//clip.test:{port}/there", "/there"),
        (308, "http://clip.test:{port}/there#x", "/there"),
        # As browsers escape it.
        (302, "/two words/%20clip é.mp4?to=ü", "/two%20words/%20clip%20%C3%A9.mp4?to=%C3%BC"),
        (302, "http://clip.test:{port}/日本.mp4", "/%E6%97%A5%E6%9C%AC.mp4"),
    ],
)
async def test_a_redirect_is_followed_without_cookies(status: int, location: str, target: str) -> None:
    async def elsewhere(writer: asyncio.StreamWriter) -> None:
        first = len(server.requests) == 1
        writer.write(redirect(location.format(port=server.port), status) if first else ok())

    async with serving(elsewhere) as server:
        assert await fetched(server) == BODY
    assert server.requests[1].startswith(f"GET {target} HTTP/1.1\r\n")
    assert "cookie" not in server.requests[1].lower()


async def test_a_circle_of_redirects_ends() -> None:
    async with serving(redirect("/clip.mp4")) as server:
        with pytest.raises(MediaRejected, match="redirects more than 3 times"):
            await fetched(server, max_redirects=3)
    assert server.connections == 4


FORBIDDEN_REDIRECTS = """
    http://127.0.0.2:{canary}/ //127.0.0.2:{canary}/ https://127.0.0.2:{canary}/ http://[::ffff:127.0.0.2]:{canary}/
    http://inside.test:{canary}/ http://clip.test:81/ http://unknown.test/ file:///etc/passwd data:,abc
"""


@pytest.mark.parametrize("location", FORBIDDEN_REDIRECTS.split())
async def test_a_redirect_to_a_forbidden_target_is_refused_without_naming_it(location: str) -> None:
    resolver = Resolver(clip_test=[["127.0.0.1"]], inside_test=[["127.0.0.2"]])
    async with serving(ok(), "127.0.0.2") as canary, serving(b"") as server:
        server.answer = redirect(location.format(canary=canary.port))
        fetcher = Fetcher(replace(policy(server.port), ports=frozenset({server.port, canary.port, 80})), resolver)
        with pytest.raises(MediaForbidden, match=r"^video\.url redirects to an address that may not be reached$"):
            await fetcher.fetch("video", url_of(server))
    assert (server.connections, canary.connections) == (1, 0)


@pytest.mark.parametrize("location", ["http://127.1/", "http://a@clip.test/", "http://["])
async def test_a_redirect_to_a_malformed_url_is_rejected(location: str) -> None:
    async with serving(redirect(location)) as server:
        with pytest.raises(MediaRejected, match=r"video\.url redirects to a malformed URL"):
            await fetched(server)


async def test_the_dialled_address_is_the_checked_one() -> None:
    resolver = Resolver(clip_test=[["127.0.0.1"], ["127.0.0.2"]])
    async with serving(ok()) as server, serving(b"", "127.0.0.2", server.port) as canary:
        assert await fetched(server, resolver) == BODY
    assert resolver.asked == ["clip.test"]
    assert canary.connections == 0


async def test_a_name_is_checked_again_after_each_redirect() -> None:
    resolver = Resolver(clip_test=[["127.0.0.1"], ["127.0.0.2"]])
    async with serving(redirect("/again")) as server, serving(ok(), "127.0.0.2", server.port) as canary:
        with pytest.raises(MediaForbidden, match="redirects to an address that may not be reached"):
            await fetched(server, resolver)
    assert resolver.asked == ["clip.test", "clip.test"]
    assert (server.connections, canary.connections) == (1, 0)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1.", "0.0.0.0", "10.0.0.1", "169.254.169.254", "[::1]", "[::ffff:127.0.0.1]"]
)
async def test_a_forbidden_address_is_not_dialled_whether_given_or_looked_up(host: str) -> None:
    resolver = Resolver(inside_test=[[host.strip("[]").rstrip(".")]])
    async with serving(ok()) as canary:
        fetcher = Fetcher(FetchPolicy(ports=frozenset({canary.port})), resolver)
        for name in (host, "inside.test"):
            with pytest.raises(MediaForbidden, match=r"^video\.url has no address that may be reached"):
                await fetcher.fetch("video", f"http://{name}:{canary.port}/")
    assert canary.connections == 0


async def test_internal_names_give_the_same_error_and_unknown_ones_are_not_forbidden() -> None:
    resolver = Resolver(inside_test=[["10.1.2.3"]], mixed_test=[["8.8.8.8", "10.1.2.3"]], empty_test=[[]])
    told = set()
    with pytest.raises(MediaRejected, match=r"video\.url names a host that cannot be resolved: 'unknown.test'"):
        await Fetcher(FetchPolicy(), resolver).fetch("video", "http://unknown.test/")
    for host in ("inside.test", "mixed.test", "empty.test"):
        with pytest.raises(GridsieveError) as refused:
            await Fetcher(FetchPolicy(), resolver).fetch("video", f"http://{host}/")
        told.add((type(refused.value), str(refused.value).replace(host, "HOST").partition(";")[0]))
    assert told == {(MediaForbidden, "video.url has no address that may be reached: 'HOST'")}


@pytest.mark.parametrize(
    ("url", "error", "why"),
    [
        ("http://clip.test:8081/", MediaForbidden, "must have port 80 or 322 or 443 or 554, got 8081"),
        ("http://other.test/", MediaForbidden, "--allow-media-domain does not allow: 'other.test'"),
        ("http://0x7f.1/", InvalidRequest, "not an address in plain form"),
        ("http://clip.test@127.0.0.1/", InvalidRequest, "without a user name"),
    ],
)
async def test_a_forbidden_or_disguised_url_is_not_even_looked_up(url: str, error: type[Exception], why: str) -> None:
    resolver = Resolver()
    allowed = FetchPolicy(domains=(AllowedDomain.parse("clip.test"),))
    with pytest.raises(error, match=rf"^video\.url .*{why}"):
        await Fetcher(allowed, resolver).fetch("video", url)
    assert not resolver.asked


async def test_the_next_address_is_dialled_if_one_does_not_answer() -> None:
    resolver = Resolver(clip_test=[["127.0.0.3", "127.0.0.1"]])
    async with serving(ok()) as server:
        fetcher = Fetcher(policy(server.port, "clip.test=127.0.0.0/8"), resolver)
        (await fetcher.fetch("video", url_of(server))).close()


async def test_proxies_of_the_environment_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(ok(b"proxied")) as proxy, serving(ok()) as server:
        for variable in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(variable, f"http://127.0.0.1:{proxy.port}")
        assert await fetched(server) == BODY
    assert proxy.connections == 0


# --- TLS ------------------------------------------------------------------------------------------------------------

AUTHORITY = trustme.CA()


def trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


@asynccontextmanager
async def tls_fetcher(
    answer: bytes | Behaviour, *names: str, trusted: trustme.CA = AUTHORITY
) -> AsyncIterator[tuple[Fetcher, Server]]:
    """A server at 127.0.0.1 with a certificate for these names; the fetcher knows it as clip.test and other.test."""
    resolver = Resolver(clip_test=[["127.0.0.1"]], other_test=[["127.0.0.1"]])
    certified = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    AUTHORITY.issue_cert(*names).configure_cert(certified)
    async with serving(answer, tls=certified) as server:
        yield Fetcher(policy(server.port, "*=127.0.0.1"), resolver, trusting(trusted)), server


@pytest.mark.parametrize("host", ["clip.test.", "127.0.0.1"])
async def test_a_certificate_for_the_host_of_the_url_is_accepted(host: str) -> None:
    async with tls_fetcher(ok(), "clip.test", "127.0.0.1") as (fetcher, server):
        (await fetcher.fetch("video", f"https://{host}:{server.port}/")).close()


@pytest.mark.parametrize(
    ("names", "trusted"), [(("127.0.0.1", "other.test"), AUTHORITY), (("clip.test",), trustme.CA())]
)
async def test_a_certificate_of_a_wrong_name_or_issuer_is_refused(names: tuple[str, ...], trusted: trustme.CA) -> None:
    async with tls_fetcher(ok(), *names, trusted=trusted) as (fetcher, server):
        with pytest.raises(MediaRejected, match="no valid certificate"):
            await fetcher.fetch("video", f"https://clip.test:{server.port}/")
    assert not server.requests


async def test_a_certificate_is_checked_again_after_a_redirect_to_the_same_address() -> None:
    async def to_other(writer: asyncio.StreamWriter) -> None:
        writer.write(redirect(f"https://other.test:{server.port}/"))
        await writer.drain()
        await asyncio.sleep(1)  # keep-alive, so that a client could reuse the connection

    async with tls_fetcher(to_other, "clip.test") as (fetcher, server):
        with pytest.raises(MediaRejected, match="no valid certificate"):
            await fetcher.fetch("video", f"https://clip.test:{server.port}/")
    assert len(server.requests) == 1


async def test_tls_that_breaks_in_mid_stream_is_rejected() -> None:
    async def breaking(writer: asyncio.StreamWriter) -> None:
        writer.write(head(200, "Content-Length: 1000") + b"a" * 10)
        await asyncio.sleep(0.1)
        os.write(writer.get_extra_info("socket").fileno(), b"\x17\x03\x03\x00\x20" + bytes(32))
        await asyncio.sleep(0.1)

    async with tls_fetcher(breaking, "clip.test") as (fetcher, server):
        with pytest.raises(MediaRejected, match="broke off"):
            await fetcher.fetch("video", f"https://clip.test:{server.port}/")


# --- name lookups ---------------------------------------------------------------------------------------------------

V6 = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("2606::1", 0, 0, 0))
V4 = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))
TIMEOUT_S = 20.0


class NameServers:
    """Replaces the system's resolver. A lookup of dead.test hangs until `answers` is set."""

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


async def test_a_lookup_returns_all_addresses_of_a_name_once(servers: NameServers) -> None:
    assert await SystemResolver(1).look_up("example.org") == ["2606::1", "127.0.0.1"]


async def test_abandoned_lookups_count_against_the_limit_until_they_end(servers: NameServers) -> None:
    names = SystemResolver(3)
    left = [asyncio.create_task(names.look_up("dead.test")) for _ in range(3)]
    await until(lambda: servers.waiting == 3)
    for each in left:
        each.cancel()
    await asyncio.wait(left)
    with pytest.raises(Overloaded, match="name cannot be looked up now: 3 lookups are running"):
        await names.look_up("clip.test")
    servers.answers.set()
    found: Sequence[str] = []
    while not found:
        with suppress(Overloaded):
            found = await names.look_up("clip.test")
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("http://dead.test/", r"has a host whose name lookup took .* 0\.1 s: 'dead\.test'"),
        ("http://clip.test:{port}/", r"redirects to a host whose name lookup took .* 0\.1 s"),
    ],
)
async def test_a_slow_lookup_is_rejected_without_naming_the_target_of_a_redirect(url: str, told: str) -> None:
    async def resolve(host: str) -> Sequence[str]:
        await asyncio.sleep(TIMEOUT_S if host == "dead.test" else 0)
        return ["127.0.0.1"]

    async with serving(redirect("http://dead.test/")) as server:
        with pytest.raises(MediaRejected, match=rf"^video\.url {told}$"):
            await Fetcher(policy(server.port, look_up_s=0.1), resolve).fetch("video", url.format(port=server.port))
