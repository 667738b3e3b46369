"""The second question about a clip reads none of it again: digests, indexes and fetched bodies are kept."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path

import pytest

from gridsieve.services.preprocessing.fetch.fetcher import Fetcher
from gridsieve.services.preprocessing.sources.digests import digests
from gridsieve.services.preprocessing.sources.source import path_source
from tests.preprocessing.media_server import BODY, Resolver, Server, head, ok, policy, redirect, serving, url_of

HOUR_AGO_S = 3600


def old(path: Path, data: bytes) -> None:
    """Writes a file whose last modification is an hour old; that of its inode cannot be set."""
    path.write_bytes(data)
    os.utime(path, (time.time() - HOUR_AGO_S,) * 2)


def digest(path: Path, known: object) -> bytes:
    with closing(path_source("video", path.name, path.parent, known=known)) as source:  # type: ignore[arg-type]
        return source.digest


def test_a_file_is_hashed_again_only_if_it_was_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hits: list[bool] = []
    known, path = digests(hits.append), tmp_path / "clip.mp4"
    old(path, b"one")
    fresh = digest(path, known)
    assert digest(path, known) == fresh
    assert hits == [False, False]  # changed a moment ago: it may change again without a sign
    real = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() + 10 * 10**9)
    assert [digest(path, known) for _ in range(2)] == [fresh] * 2
    assert hits == [False, False, False, True]
    old(path, b"two")
    assert digest(path, known) != fresh
    replacement = tmp_path / "other"
    old(replacement, b"one")
    replacement.rename(path)
    assert digest(path, known) == fresh
    assert hits == [False, False, False, True, False, False]


class Kept:
    """A fetcher of some servers, and what it observed."""

    def __init__(self, *servers: Server, **limits: float) -> None:
        self.hits: list[bool] = []
        self.fetched: list[int] = []
        allowed = replace(policy(servers[0].port, **limits), ports=frozenset(each.port for each in servers))
        resolver = Resolver(clip_test=[["127.0.0.1"]])
        self.fetcher = Fetcher(allowed, resolver, on_bytes=self.fetched.append, on_get=self.hits.append)

    async def body(self, url: str) -> bytes:
        source = await self.fetcher.fetch("video", url)
        with closing(source), source.open() as file:
            return file.read()


@asynccontextmanager
async def kept_from(*servers: Server, **limits: float) -> AsyncIterator[Kept]:
    kept = Kept(*servers, **limits)
    try:
        yield kept
    finally:
        kept.fetcher.close()


@pytest.mark.parametrize(
    ("headers", "requests"),
    [
        (["Cache-Control: public, max-age=60"], 1),
        (["Cache-Control: max-age=0, s-maxage=60"], 1),
        (["Cache-Control: max-age=60", "Age: 60"], 2),
        (["Cache-Control: max-age=60, no-store"], 2),
        (["Cache-Control: private, max-age=60"], 2),
        (["Cache-Control: max-age=60", "Vary: *"], 2),
        (["Cache-Control: max-age=many"], 2),
        ([], 2),
    ],
)
async def test_a_body_is_kept_for_as_long_as_its_server_allows(headers: list[str], requests: int) -> None:
    async with serving(ok(BODY, *headers)) as server, kept_from(server) as kept:
        assert [await kept.body(url_of(server, "/clip.mp4")) for _ in range(2)] == [BODY] * 2
        assert len(server.requests) == requests
        assert kept.hits == [False, requests == 1]
        assert sum(kept.fetched) == requests * len(BODY)


@pytest.mark.parametrize(
    ("validator", "condition"),
    [('ETag: "v1"', 'if-none-match: "v1"'), ("Last-Modified: then", "if-modified-since: then")],
)
async def test_an_old_body_is_used_if_its_server_says_that_it_has_not_changed(validator: str, condition: str) -> None:
    async with serving(ok(BODY, validator, "Cache-Control: no-cache, max-age=60")) as server, kept_from(server) as kept:
        url = url_of(server, "/clip.mp4")
        assert await kept.body(url) == BODY
        server.answer = head(304, validator, "Cache-Control: max-age=60")
        assert [await kept.body(url) for _ in range(2)] == [BODY] * 2
        assert condition in server.requests[1].lower()
        assert (len(server.requests), kept.hits) == (2, [False, True, True])
        # Another query, such as another caller's signature, is another URL.
        server.answer = ok(b"other")
        assert await kept.body(f"{url}?signature=2") == b"other"
        assert "if-" not in server.requests[2].lower()


async def test_a_changed_body_replaces_the_one_that_was_kept() -> None:
    async with serving(ok(BODY, 'ETag: "v1"')) as server, kept_from(server) as kept:
        url = url_of(server, "/clip.mp4")
        assert await kept.body(url) == BODY
        server.answer = ok(b"new", 'ETag: "v2"')
        assert await kept.body(url) == b"new"
        server.answer = head(304)
        assert await kept.body(url) == b"new"
        assert '"v2"' in server.requests[2]


async def test_a_redirect_is_followed_again_to_a_kept_body() -> None:
    async with serving(ok(BODY, "Cache-Control: max-age=60")) as final, serving(b"") as first:
        first.answer = redirect(url_of(final, "/clip.mp4"))
        async with kept_from(final, first) as kept:
            assert [await kept.body(url_of(first)) for _ in range(2)] == [BODY] * 2
        assert (len(first.requests), len(final.requests)) == (2, 1)


async def test_kept_bodies_make_room_on_the_disk() -> None:
    async with (
        serving(ok(BODY, "Cache-Control: max-age=60")) as server,
        kept_from(server, max_bytes=len(BODY), disk_bytes=2 * len(BODY)) as kept,
    ):
        for path in ("/1", "/2", "/3", "/2", "/1"):
            assert await kept.body(url_of(server, path)) == BODY
        assert kept.hits == [False, False, False, True, False]
