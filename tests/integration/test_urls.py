"""Media by URL through three real processes, from a real server on loopback."""

from __future__ import annotations

import re
import tempfile
from functools import partial
from pathlib import Path

import pytest

from gridsieve.client.answer import Answer
from gridsieve.client.client import GridsieveClient
from gridsieve.client.prompt import Video
from gridsieve.common.contract import errors
from tests import media
from tests.integration.conftest import FETCH_MAX_BYTES
from tests.integration.fleet import Stack, until
from tests.preprocessing.media_server import Server, fetched_files, head, ok, redirect, serving

CLIP = media.clip(16, fps=4)


async def ask(client: GridsieveClient, video: Video) -> Answer:
    return await client.ask(video, "What moves?", pruning_rate=0.5, max_new_tokens=8, temperature=0, timeout_s=30)


def by_url(port: int) -> Video:
    return Video(url=f"http://localhost:{port}/clip.mp4")


async def is_left(stack: Stack, server: Server) -> None:
    """Returns once all connections to the server have ended and preprocessing has closed its files."""
    open_files = partial(fetched_files, Path(tempfile.gettempdir()), stack.services["preprocessing"].pid)
    await until(lambda: all(task.done() for task in server.serving) and open_files() == 0)


async def test_no_name_of_this_machine_may_be_fetched_from_by_default(scripted: Stack, fetch_port: int) -> None:
    hosts = ["127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0", "169.254.169.254"]
    refused = [(f"http://{host}/", "has no address that may be") for host in hosts]
    refused.append((f"http://localhost:{fetch_port}/", "must have port 80 or 322 or 443 or 554"))
    async with serving(ok(CLIP), port=fetch_port) as canary, GridsieveClient(scripted.address) as client:
        for url, why in refused:
            with pytest.raises(errors.MediaForbidden, match=why):
                await ask(client, Video(url=url))
    assert canary.connections == 0


@pytest.mark.parametrize(
    ("host", "answer", "error", "why"),
    [
        # An allowed domain allows no other name of its address.
        ("[::ffff:7f00:1]", ok(CLIP), errors.MediaForbidden, "url has no address that may be reached"),
        (
            "localhost",
            redirect("http://127.0.0.2:{port}/"),
            errors.MediaForbidden,
            "redirects to an address that may not be",
        ),
        ("localhost", head(200) + bytes(FETCH_MAX_BYTES + 1), errors.MediaRejected, f"more than the {FETCH_MAX_BYTES}"),
    ],
    ids=["disguised name", "redirect", "too large"],
)
async def test_a_url_that_cannot_be_used_is_refused_by_its_field_and_the_next_one_is_answered(
    stack: Stack,
    client: GridsieveClient,
    fetch_port: int,
    host: str,
    answer: bytes,
    error: type[errors.GridsieveError],
    why: str,
) -> None:
    answer = answer.replace(b"{port}", str(fetch_port).encode())
    async with serving(ok(CLIP), "127.0.0.2", fetch_port) as canary, serving(answer, port=fetch_port) as server:
        field = re.escape("prompt.messages[0].parts[0].video")
        with pytest.raises(error, match=f"^{field}.*{why}"):
            await ask(client, Video(url=f"http://{host}:{fetch_port}/clip.mp4"))
        assert server.connections == (host == "localhost")
        await is_left(stack, server)
        server.answer = ok(CLIP)
        assert (await ask(client, by_url(fetch_port))).usage.completion_tokens >= 1
    assert canary.connections == 0
