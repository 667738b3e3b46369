"""Media by URL through three real processes, from a real server on loopback: what is reached, refused and left."""

from __future__ import annotations

import asyncio
import base64
import tempfile
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from common.contract import errors
from framesieve.cli.launcher import LocalStack
from framesieve.client.answer import Answer, Usage
from framesieve.client.client import FramesieveClient
from framesieve.client.prompt import Image, Video
from tests import media
from tests.integration.conftest import FETCH_MAX_BYTES, idle, metric, settles
from tests.preprocessing.media_server import Server, fetched_files, head, ok, redirect, serving

CLIP = media.clip(16, fps=4)


@pytest.fixture
async def client(strict: LocalStack) -> AsyncIterator[FramesieveClient]:
    async with FramesieveClient(strict.address) as connected:
        yield connected


async def asked(client: FramesieveClient, media: Video | Image) -> Answer:
    return await client.ask(
        media, "What moves?", pruning_rate=0.5, max_new_tokens=8, temperature=0, logprobs=True, timeout_s=30
    )


def by_url(port: int, path: str = "/clip.mp4") -> Video:
    return Video(url=f"http://localhost:{port}{path}")


def open_files(stack: LocalStack) -> int:
    """How many files preprocessing has open that it fetches or fetched into."""
    return fetched_files(Path(tempfile.gettempdir()), stack.processes["preprocessing"].pid)


def told(answer: Answer) -> tuple[tuple[int, ...], Usage]:
    """What was answered and what it cost, whether or not the cache held some of it."""
    return answer.token_ids, replace(answer.usage, cached_prompt_tokens=0)


async def is_left(stack: LocalStack, server: Server) -> bool:
    """Whether all connections to the server end, and preprocessing closes what it was fetching into."""

    def connected() -> float:
        return sum(not task.done() for task in server.serving)

    return await settles(connected, 0) and await settles(partial(open_files, stack), 0)


async def test_by_default_this_machine_is_reached_under_none_of_its_names(stack: LocalStack, fetch_port: int) -> None:
    hosts = ["127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0", "169.254.169.254"]
    async with serving(ok(CLIP), port=fetch_port) as canary, FramesieveClient(stack.address) as client:
        for host in hosts:
            with pytest.raises(errors.MediaForbidden, match=r"parts\[0\]\.video\.url must have port 80 or 443"):
                await asked(client, Video(url=f"http://{host}:{fetch_port}/clip.mp4"))
            with pytest.raises(errors.MediaForbidden, match=r"parts\[0\]\.video\.url has no address that may be"):
                await asked(client, Video(url=f"http://{host}/clip.mp4"))
    assert canary.connections == 0


async def test_a_domain_that_is_opened_opens_nothing_under_another_name(
    client: FramesieveClient, fetch_port: int
) -> None:
    async with serving(ok(CLIP), port=fetch_port) as canary:
        for host in ("127.0.0.1", "[::ffff:7f00:1]", "0.0.0.0"):
            with pytest.raises(errors.MediaForbidden, match="has no address that may be reached"):
                await asked(client, Video(url=f"http://{host}:{fetch_port}/clip.mp4"))
    assert canary.connections == 0


async def test_an_answer_by_url_is_the_answer_by_bytes(
    strict: LocalStack, client: FramesieveClient, fetch_port: int
) -> None:
    await idle(strict)
    before = metric(strict, "preprocessing", "framesieve_stage_busy_seconds_count", stage="fetch")
    async with serving(ok(CLIP), port=fetch_port) as server:
        fetched = await asked(client, by_url(fetch_port))
    sent = await asked(client, Video(data=CLIP))
    assert server.connections == 1
    assert fetched.timings.fetch_s > 0 == sent.timings.fetch_s
    assert told(fetched) == told(sent)
    assert fetched.logprobs == pytest.approx(sent.logprobs, abs=1e-4)
    assert metric(strict, "preprocessing", "framesieve_stage_busy_seconds_count", stage="fetch") == before + 1
    assert await is_left(strict, server)


async def test_a_data_uri_is_answered_as_its_bytes(stack: LocalStack) -> None:
    clip, picture = base64.b64encode(CLIP).decode(), media.picture(112, 84)
    async with FramesieveClient(stack.address) as client:
        fetched = await asked(client, Video(url=f"data:video/mp4;base64,{clip}"))
        sent = await asked(client, Video(data=CLIP))
        shown = await asked(client, Image(url="data:image/png;base64," + base64.b64encode(picture).decode()))
    assert told(fetched) == told(sent)
    assert shown.usage.media[0].modality.value == "image"


@pytest.mark.parametrize(
    ("answer", "error", "why"),
    [
        (head(404, "Content-Length: 0"), errors.MediaRejected, "was answered with status 404"),
        (
            head(200, f"Content-Length: {FETCH_MAX_BYTES + 1}"),
            errors.MediaRejected,
            f"more than the {FETCH_MAX_BYTES} bytes",
        ),
        (head(200) + bytes(FETCH_MAX_BYTES + 1), errors.MediaRejected, f"more than the {FETCH_MAX_BYTES} bytes"),
        (head(200, "Content-Length: 9") + b"x", errors.MediaRejected, "broke off"),
        (redirect("http://127.0.0.2:{port}/"), errors.MediaForbidden, "redirects to what may not be reached"),
        (redirect("http://169.254.169.254/latest/meta-data/"), errors.MediaForbidden, "redirects to what may not be"),
        (redirect("file:///etc/passwd"), errors.MediaForbidden, "redirects to what may not be reached"),
    ],
    ids=["gone", "too large, as it says", "too large", "cut", "to this machine", "to metadata", "to a file"],
)
async def test_what_cannot_be_had_is_refused_by_field_and_the_next_is_answered(
    strict: LocalStack,
    client: FramesieveClient,
    fetch_port: int,
    answer: bytes,
    error: type[errors.FramesieveError],
    why: str,
) -> None:
    answer = answer.replace(b"{port}", str(fetch_port).encode())
    async with serving(ok(CLIP), "127.0.0.2", fetch_port) as canary, serving(answer, port=fetch_port) as server:
        with pytest.raises(error, match=rf"^prompt\.messages\[0\]\.parts\[0\]\.video\.url .*{why}"):
            await asked(client, by_url(fetch_port))
        assert await is_left(strict, server)
        server.answer = ok(CLIP)
        assert (await asked(client, by_url(fetch_port))).usage.completion_tokens >= 1
    assert canary.connections == 0


async def test_media_that_is_fetched_and_is_none_is_rejected(client: FramesieveClient, fetch_port: int) -> None:
    async with serving(ok(b"<html>not here</html>"), port=fetch_port):
        with pytest.raises(errors.MediaRejected, match=r"^prompt\.messages\[0\]\.parts\[0\]\.video"):
            await asked(client, by_url(fetch_port))


@pytest.mark.parametrize("leaves", ["by cancelling", "by its deadline"])
async def test_a_client_that_leaves_during_a_slow_download_ends_it(
    strict: LocalStack, client: FramesieveClient, fetch_port: int, leaves: str
) -> None:
    async def drip(writer: asyncio.StreamWriter) -> None:
        writer.write(head(200, "Content-Length: 100000"))
        while True:
            writer.write(b"a")
            await writer.drain()
            await asyncio.sleep(0.01)

    async with serving(drip, port=fetch_port) as server:
        # Long enough that the download has begun, however busy the machine is.
        timeout_s = 5.0 if leaves == "by its deadline" else 60.0
        asking = asyncio.create_task(client.ask(by_url(fetch_port), "What moves?", timeout_s=timeout_s))
        assert await settles(partial(_connections, server), 1)
        assert await settles(partial(open_files, strict), 1)
        if leaves == "by cancelling":
            asking.cancel()
        with pytest.raises((asyncio.CancelledError, errors.DeadlinePassed)):
            await asking
        assert await is_left(strict, server)
    for service in ("generation", "encoder", "preprocessing"):
        assert await settles(partial(metric, strict, service, "framesieve_requests_running"), 0)


def _connections(server: Server) -> float:
    return server.connections
