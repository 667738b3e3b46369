"""The fetcher over real sockets on loopback: what it brings, what it refuses, and whom it never connects to.

Names resolve through a resolver of the test's own, and a look-up of the system's fails the test. Loopback is opened as
an operator would open it: by a domain with its network.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import resource
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import FramesieveError, InvalidRequest, MediaForbidden, MediaRejected, Overloaded
from services.preprocessing.fetch.fetcher import AT_ONCE, Fetcher, look_up
from services.preprocessing.fetch.policy import AllowedDomain, FetchPolicy
from tests.unit.loopback import BODY, Resolver, Server, head, ok, policy, redirect, serving


@pytest.fixture(autouse=True)
def _no_name_is_looked_up_by_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve = socket.getaddrinfo

    def numeric_only(host: str | None, *arguments: object, **options: object) -> object:
        return resolve(host, *arguments, **{**options, "flags": socket.AI_NUMERICHOST})  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", numeric_only)


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


async def forever(writer: asyncio.StreamWriter, piece: bytes, every_s: float = 0.0) -> None:
    while True:
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(every_s)


@pytest.mark.parametrize("length", [f"Content-Length: {len(BODY)}", f"Content-Length: {10**19}"])
async def test_a_length_above_the_limit_is_refused_before_the_body_is_sent(length: str) -> None:
    async def only_a_head(writer: asyncio.StreamWriter) -> None:
        writer.write(head(200, length))
        await asyncio.sleep(60)

    async with serving(only_a_head) as server:
        start = time.perf_counter()
        with pytest.raises(MediaRejected, match=f"more than the {len(BODY) - 1} bytes"):
            await fetched(server, max_bytes=len(BODY) - 1)
        assert time.perf_counter() - start < 10


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
        with pytest.raises(MediaRejected, match=r"^video\.url (took longer than the 0\.4 s|could not be fetched)"):
            await fetched(server, total_s=0.4)
        assert time.perf_counter() - start_s < 5
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
        with pytest.raises(MediaRejected, match=r"longer than the 0\.5 s"):
            await fetched(server, total_s=0.5, max_redirects=100)
    with pytest.raises(MediaRejected, match=r"longer than the 0\.1 s"):
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
        with pytest.raises(MediaRejected, match=r"video\.url redirects to what is no URL"):
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


async def test_the_system_is_asked_for_all_addresses_of_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answers(*_: object, **options: object) -> list[tuple[object, ...]]:
        assert options["type"] == socket.SOCK_STREAM
        v6 = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("2606::1", 0, 0, 0))
        v4 = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("8.8.8.8", 0))
        return [v6, v4, v4]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", answers)
    assert await look_up("example.org") == ["2606::1", "8.8.8.8"]


# --- several at once, and the disk that they share --------------------------------------------------------------


def fetcher_of(server: Server, **limits: float) -> Fetcher:
    return Fetcher(policy(server.port, **limits), Resolver(clip_test=[["127.0.0.1"]]))


def url_of(server: Server, path: str = "/") -> str:
    return f"http://clip.test:{server.port}{path}"


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
        urls = {str(number): url_of(server) for number in range(AT_ONCE + 3)}
        fetching = asyncio.create_task(fetcher_of(server).fetch_all(urls))
        while server.connections < AT_ONCE:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        assert server.connections == AT_ONCE
        enough.set()
        for source in (await fetching).values():
            source.close()
    assert server.connections == AT_ONCE + 3


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
