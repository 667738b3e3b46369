"""The fetcher over TLS: a certificate is held to the name in the URL, whatever address was dialled for it."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trustme

from common.contract.errors import MediaRejected
from services.preprocessing.fetch.fetcher import Fetcher
from tests.preprocessing.media_server import Behaviour, Resolver, Server, head, ok, policy, redirect, serving


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


def certified(authority: trustme.CA, *names: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(*names).configure_cert(context)
    return context


@asynccontextmanager
async def tls_fetcher(
    authority: trustme.CA, answer: bytes | Behaviour, *names: str, trusted: trustme.CA | None = None
) -> AsyncIterator[tuple[Fetcher, Server]]:
    """A server at 127.0.0.1 with a certificate for these names, and who may reach it as clip.test and other.test."""
    resolver = Resolver(clip_test=[["127.0.0.1"]], other_test=[["127.0.0.1"]])
    async with serving(answer, tls=certified(authority, *names)) as server:
        allowed = policy(server.port, "*=127.0.0.1")
        yield Fetcher(allowed, resolver, trusting(trusted or authority)), server


@pytest.mark.parametrize("host", ["clip.test", "clip.test.", "127.0.0.1"])
async def test_a_certificate_is_held_to_the_name_in_the_url(authority: trustme.CA, host: str) -> None:
    async with tls_fetcher(authority, ok(), "clip.test", "127.0.0.1") as (fetcher, server):
        source = await fetcher.fetch("video", f"https://{host}:{server.port}/")
        source.close()


async def test_a_certificate_for_the_address_or_another_name_is_not_one_for_the_host(authority: trustme.CA) -> None:
    async with tls_fetcher(authority, ok(), "127.0.0.1", "other.test") as (fetcher, server):
        with pytest.raises(MediaRejected, match="no valid certificate"):
            await fetcher.fetch("video", f"https://clip.test:{server.port}/")
    assert not server.requests


async def test_a_certificate_of_nobody_is_refused(authority: trustme.CA) -> None:
    async with tls_fetcher(authority, ok(), "clip.test", trusted=trustme.CA()) as (fetcher, server):
        with pytest.raises(MediaRejected, match="no valid certificate"):
            await fetcher.fetch("video", f"https://clip.test:{server.port}/")
    assert not server.requests


async def test_a_certificate_is_asked_for_again_after_a_redirect_to_the_same_address(authority: trustme.CA) -> None:
    async def to_other(writer: asyncio.StreamWriter) -> None:
        writer.write(redirect(f"https://other.test:{server.port}/"))
        await writer.drain()
        await asyncio.sleep(1)  # kept alive, so that a client could go on with it

    async with tls_fetcher(authority, to_other, "clip.test") as (fetcher, server):
        with pytest.raises(MediaRejected, match="no valid certificate"):
            await fetcher.fetch("video", f"https://clip.test:{server.port}/")
    assert len(server.requests) == 1


async def test_tls_that_breaks_in_mid_stream_is_rejected(authority: trustme.CA) -> None:
    async def breaking(writer: asyncio.StreamWriter) -> None:
        writer.write(head(200, "Content-Length: 1000") + b"a" * 10)
        await asyncio.sleep(0.1)
        os.write(writer.get_extra_info("socket").fileno(), b"\x17\x03\x03\x00\x20" + bytes(32))
        await asyncio.sleep(0.1)

    async with tls_fetcher(authority, breaking, "clip.test") as (fetcher, server):
        with pytest.raises(MediaRejected, match="broke off"):
            await fetcher.fetch("video", f"https://clip.test:{server.port}/")


async def test_a_handshake_that_is_not_answered_ends_with_the_time_to_connect(authority: trustme.CA) -> None:
    resolver = Resolver(clip_test=[["127.0.0.1"]])
    async with serving(b"") as server:  # waits for a request in plain text
        fetcher = Fetcher(policy(server.port, connect_s=0.2), resolver, trusting(authority))
        with pytest.raises(MediaRejected, match="cannot be connected to"):
            await fetcher.fetch("video", f"https://clip.test:{server.port}/")
