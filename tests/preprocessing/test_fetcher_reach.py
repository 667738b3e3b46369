"""Whom the fetcher connects to and whom never: redirects, addresses in disguise, names that move.

Names resolve through a resolver of the test's own. A canary is a server that must receive no connection.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from common.contract.errors import FramesieveError, InvalidRequest, MediaForbidden, MediaRejected
from services.preprocessing.fetch.fetcher import Fetcher
from services.preprocessing.fetch.policy import AllowedDomain, FetchPolicy
from tests.preprocessing.fetching import fetched
from tests.preprocessing.media_server import BODY, Resolver, ok, policy, redirect, serving

pytest_plugins = ["tests.preprocessing.fixtures"]
pytestmark = pytest.mark.usefixtures("no_name_is_looked_up")


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("location", ["/there", "there", "//clip.test:{port}/there", "http://clip.test:{port}/there#x"])
async def test_a_redirect_is_followed_without_cookies(status: int, location: str) -> None:
    async def elsewhere(writer: asyncio.StreamWriter) -> None:
        first = len(server.requests) == 1
        writer.write(redirect(location.format(port=server.port), status) if first else ok())

    async with serving(elsewhere) as server:
        assert await fetched(server) == BODY
    assert server.requests[1].startswith("GET /there HTTP/1.1\r\n")
    assert "cookie" not in server.requests[1].lower()


async def test_a_redirect_to_another_host_is_followed_to_where_that_one_lies() -> None:
    resolver = Resolver(clip_test=[["127.0.0.1"]], other_test=[["127.0.0.2"]])
    async with serving(ok(), "127.0.0.2") as other, serving(b"", port=other.port) as server:
        server.answer = redirect(f"http://other.test:{other.port}/there")
        allowed = policy(server.port, "clip.test=127.0.0.1", "other.test=127.0.0.2")
        source = await Fetcher(allowed, resolver).fetch("video", f"http://clip.test:{server.port}/")
        source.close()
    assert f"Host: other.test:{other.port}\r\n" in other.requests[0]
    assert (server.connections, other.connections) == (1, 1)


@pytest.mark.parametrize(("allowed", "connections"), [(0, 1), (3, 4)])
async def test_a_circle_of_redirects_ends(allowed: int, connections: int) -> None:
    async with serving(redirect("/clip.mp4")) as server:
        with pytest.raises(MediaRejected, match=f"redirects more than {allowed} times"):
            await fetched(server, max_redirects=allowed)
    assert server.connections == connections


@pytest.mark.parametrize(
    "location",
    [
        "http://127.0.0.1:{canary}/",
        "http://127.0.0.2:{canary}/",
        "//127.0.0.2:{canary}/",
        "http://[::1]:{canary}/",
        "http://[::ffff:127.0.0.2]:{canary}/",
        "http://localhost:{canary}/",
        "http://inside.test:{canary}/",
        "http://clip.test:81/",
        "https://127.0.0.2:{canary}/",
        "http://169.254.169.254/latest/meta-data/",
        "http://unknown.test/",
        "file:///etc/passwd",
        "ftp://clip.test/",
        "data:,abc",
    ],
)
async def test_a_redirect_to_what_may_not_be_reached_is_forbidden_and_not_told(location: str) -> None:
    resolver = Resolver(clip_test=[["127.0.0.1"]], inside_test=[["127.0.0.2"]], localhost=[["127.0.0.1", "::1"]])
    async with serving(ok(), "127.0.0.2") as canary, serving(b"") as server:
        server.answer = redirect(location.format(canary=canary.port))
        fetcher = Fetcher(replace(policy(server.port), ports=frozenset({server.port, canary.port, 80})), resolver)
        with pytest.raises(MediaForbidden) as refused:
            await fetcher.fetch("video", f"http://clip.test:{server.port}/")
    assert str(refused.value) == "video.url redirects to what may not be reached"
    assert (server.connections, canary.connections) == (1, 0)


@pytest.mark.parametrize(
    "location", ["http://127.1/", "http://2130706433/", "http://a@clip.test/", "http://[", "http://a\\b/", "http://é/"]
)
async def test_a_redirect_to_what_is_no_url_is_rejected(location: str) -> None:
    async with serving(redirect(location)) as server:
        with pytest.raises(MediaRejected, match=r"video\.url redirects to a malformed URL"):
            await fetched(server)


async def test_the_address_that_was_checked_is_the_address_that_is_dialled() -> None:
    resolver = Resolver(clip_test=[["127.0.0.1"], ["127.0.0.2"]])
    async with serving(ok()) as server, serving(b"", "127.0.0.2", server.port) as canary:
        assert await fetched(server, resolver) == BODY
    assert resolver.asked == ["clip.test"]
    assert canary.connections == 0


async def test_a_name_that_moves_between_redirects_is_checked_again() -> None:
    resolver = Resolver(clip_test=[["127.0.0.1"], ["127.0.0.2"]])
    async with serving(redirect("/again")) as server, serving(ok(), "127.0.0.2", server.port) as canary:
        with pytest.raises(MediaForbidden, match="redirects to what may not be reached"):
            await fetched(server, resolver)
    assert resolver.asked == ["clip.test", "clip.test"]
    assert (server.connections, canary.connections) == (1, 0)


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.0.0.1.",
        "127.0.0.2",
        "0.0.0.0",
        "10.0.0.1",
        "172.16.0.1",
        "192.168.0.1",
        "100.64.0.1",
        "169.254.169.254",
        "168.63.129.16",
        "224.0.0.1",
        "255.255.255.255",
        "[::]",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "[::127.0.0.1]",
        "[64:ff9b::7f00:1]",
        "[2002:7f00:1::]",
        "[fe80::1]",
        "[fd00:ec2::254]",
        "[ff02::1]",
    ],
)
async def test_a_forbidden_address_is_not_dialled_whether_given_or_looked_up(host: str) -> None:
    resolver = Resolver(inside_test=[[host.strip("[]").rstrip(".")]])
    async with serving(ok()) as canary, serving(ok(), "127.0.0.2", canary.port) as other:
        fetcher = Fetcher(FetchPolicy(ports=frozenset({canary.port})), resolver)
        for name in (host, "inside.test"):
            with pytest.raises(MediaForbidden, match=r"^video\.url has no address that may be reached"):
                await fetcher.fetch("video", f"http://{name}:{canary.port}/")
    assert canary.connections + other.connections == 0


@pytest.mark.parametrize(
    "host", ["2130706433", "0177.0.0.1", "0x7f.1", "127.1", "a@127.0.0.1", "１２７.0.0.1", "[::1%25lo]"]
)
async def test_a_disguised_address_is_not_even_looked_up(host: str) -> None:
    resolver = Resolver()
    async with serving(ok()) as canary:
        with pytest.raises(InvalidRequest, match=r"^video\.url "):
            await Fetcher(policy(canary.port, "*=127.0.0.0/8"), resolver).fetch(
                "video", f"http://{host}:{canary.port}/"
            )
    assert canary.connections == 0
    assert not resolver.asked


async def test_an_unknown_name_and_one_inside_are_told_in_the_same_words() -> None:
    resolver = Resolver(inside_test=[["10.1.2.3"]], mixed_test=[["8.8.8.8", "10.1.2.3"]], empty_test=[[]])
    told = set()
    for host in ("inside.test", "mixed.test", "unknown.test", "empty.test"):
        with pytest.raises(FramesieveError) as refused:
            await Fetcher(FetchPolicy(), resolver).fetch("video", f"http://{host}/")
        told.add((type(refused.value), str(refused.value).replace(host, "HOST")))
    assert told == {(MediaForbidden, "video.url has no address that may be reached: 'HOST'")}


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://clip.test:8081/", "must have port 80 or 443, got 8081"),
        ("ftp://clip.test/", "must start with http:// or https://, got 'ftp'"),
        ("http://other.test/", "--allow-media-domain does not allow: 'other.test'"),
    ],
)
async def test_what_the_policy_does_not_allow_is_not_looked_up(url: str, why: str) -> None:
    resolver = Resolver()
    allowed = FetchPolicy(domains=(AllowedDomain.parse("clip.test"),))
    with pytest.raises(MediaForbidden, match=why):
        await Fetcher(allowed, resolver).fetch("video", url)
    assert not resolver.asked


async def test_an_address_that_does_not_answer_gives_way_to_the_next() -> None:
    resolver = Resolver(clip_test=[["127.0.0.3", "127.0.0.1"]])
    async with serving(ok()) as server:
        fetcher = Fetcher(policy(server.port, "clip.test=127.0.0.0/8"), resolver)
        source = await fetcher.fetch("video", f"http://clip.test:{server.port}/")
        source.close()


async def test_nobody_listening_is_told_without_an_address() -> None:
    async with serving(b"") as server:
        pass
    with pytest.raises(MediaRejected) as refused:
        await fetched(server)
    assert str(refused.value) == "video.url cannot be connected to, or has no valid certificate"


async def test_proxies_of_the_environment_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(ok(b"proxied")) as proxy, serving(ok()) as server:
        for variable in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(variable, f"http://127.0.0.1:{proxy.port}")
        assert await fetched(server) == BODY
    assert proxy.connections == 0
