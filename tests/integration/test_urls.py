"""Media by URL through three real processes, from a real server on loopback."""

from __future__ import annotations

import asyncio
import base64
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from common.channels import open_channel, upstream_errors
from common.contract import errors
from framesieve.cli.launcher import LocalStack
from framesieve.client.answer import Answer, Usage
from framesieve.client.client import FramesieveClient
from framesieve.client.prompt import Image, Video
from framesieve.v1 import preprocessing_pb2, preprocessing_pb2_grpc, prompt_pb2
from tests import media
from tests.integration.conftest import FETCH_MAX_BYTES, idle, metric, running, settles
from tests.preprocessing.media_server import Server, fetched_files, head, ok, redirect, serving

CLIP = media.clip(16, fps=4)


async def asked(client: FramesieveClient, media: Video | Image) -> Answer:
    return await client.ask(
        media, "What moves?", pruning_rate=0.5, max_new_tokens=8, temperature=0, logprobs=True, timeout_s=30
    )


def by_url(port: int) -> Video:
    return Video(url=f"http://localhost:{port}/clip.mp4")


def open_files(stack: LocalStack) -> int:
    """How many files preprocessing has open that it fetches or fetched into."""
    return fetched_files(Path(tempfile.gettempdir()), stack.processes["preprocessing"].pid)


def outcome(answer: Answer) -> tuple[tuple[int, ...], Usage]:
    """Its tokens and usage, without what depends on the prefix cache."""
    return answer.token_ids, replace(answer.usage, cached_prompt_tokens=0)


async def is_left(stack: LocalStack, server: Server) -> bool:
    """Whether all connections to the server end and preprocessing closes its files."""

    def connected() -> float:
        return sum(not task.done() for task in server.serving)

    return await settles(connected, 0) and await settles(partial(open_files, stack), 0)


async def test_no_name_of_this_machine_may_be_fetched_from_by_default(checkpoint: Path, fetch_port: int) -> None:
    hosts = ["127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0", "169.254.169.254"]
    refusals = {f":{fetch_port}": "must have port 80 or 443", "": "has no address that may be"}
    with running(checkpoint, services=["preprocessing"]) as alone:
        async with (
            serving(ok(CLIP), port=fetch_port) as canary,
            open_channel(alone.addresses["preprocessing"]) as channel,
        ):
            stub = preprocessing_pb2_grpc.PreprocessingServiceStub(channel)
            for host in hosts:
                for port, why in refusals.items():
                    request = preprocessing_pb2.PreprocessRequest()
                    message = request.prompt.messages.add(role=prompt_pb2.ROLE_USER)
                    message.parts.add().video.url = f"http://{host}{port}/clip.mp4"
                    expected = rf"parts\[0\]\.video\.url {why}"
                    with pytest.raises(errors.MediaForbidden, match=expected), upstream_errors("preprocessing"):
                        await stub.Preprocess(iter([request]), timeout=30).read()
    assert canary.connections == 0


async def test_an_allowed_domain_allows_no_other_name_of_its_address(client: FramesieveClient, fetch_port: int) -> None:
    async with serving(ok(CLIP), port=fetch_port) as canary:
        for host in ("127.0.0.1", "[::ffff:7f00:1]", "0.0.0.0"):
            with pytest.raises(errors.MediaForbidden, match="has no address that may be reached"):
                await asked(client, Video(url=f"http://{host}:{fetch_port}/clip.mp4"))
    assert canary.connections == 0


async def test_a_fetched_clip_is_answered_like_its_bytes(
    stack: LocalStack, client: FramesieveClient, fetch_port: int
) -> None:
    await idle(stack)
    before = metric(stack, "preprocessing", "framesieve_stage_busy_seconds_count", stage="fetch")
    async with serving(ok(CLIP), port=fetch_port) as server:
        fetched = await asked(client, by_url(fetch_port))
    sent = await asked(client, Video(data=CLIP))
    assert server.connections == 1
    assert fetched.timings.fetch_s > 0 == sent.timings.fetch_s
    assert outcome(fetched) == outcome(sent)
    assert fetched.logprobs == pytest.approx(sent.logprobs, abs=1e-4)
    assert metric(stack, "preprocessing", "framesieve_stage_busy_seconds_count", stage="fetch") == before + 1
    assert await is_left(stack, server)


async def test_a_data_uri_is_answered_like_its_bytes(client: FramesieveClient) -> None:
    clip, picture = (base64.b64encode(data).decode() for data in (CLIP, media.picture(112, 84)))
    fetched = await asked(client, Video(url=f"data:video/mp4;base64,{clip}"))
    sent = await asked(client, Video(data=CLIP))
    assert outcome(fetched) == outcome(sent)
    shown = await asked(client, Image(url=f"data:image/png;base64,{picture}"))
    assert shown.usage.media[0].modality.value == "image"


@pytest.mark.parametrize(
    ("answer", "error", "why"),
    [
        (head(404, "Content-Length: 0"), errors.MediaRejected, "was answered with status 404"),
        (head(200) + bytes(FETCH_MAX_BYTES + 1), errors.MediaRejected, f"more than the {FETCH_MAX_BYTES} bytes"),
        (redirect("http://127.0.0.2:{port}/"), errors.MediaForbidden, "redirects to what may not be reached"),
        (ok(b"<html>not here</html>"), errors.MediaRejected, ""),
    ],
    ids=["missing", "too large", "redirect to this machine", "not media"],
)
async def test_a_url_that_cannot_be_used_is_refused_by_its_field_and_the_next_one_is_answered(
    stack: LocalStack,
    client: FramesieveClient,
    fetch_port: int,
    answer: bytes,
    error: type[errors.FramesieveError],
    why: str,
) -> None:
    answer = answer.replace(b"{port}", str(fetch_port).encode())
    async with serving(ok(CLIP), "127.0.0.2", fetch_port) as canary, serving(answer, port=fetch_port) as server:
        with pytest.raises(error, match=rf"^prompt\.messages\[0\]\.parts\[0\]\.video.*{why}"):
            await asked(client, by_url(fetch_port))
        assert await is_left(stack, server)
        server.answer = ok(CLIP)
        assert (await asked(client, by_url(fetch_port))).usage.completion_tokens >= 1
    assert canary.connections == 0


async def test_a_client_that_disconnects_during_a_download_ends_it(
    stack: LocalStack, client: FramesieveClient, fetch_port: int
) -> None:
    async def drip(writer: asyncio.StreamWriter) -> None:
        writer.write(head(200, "Content-Length: 100000"))
        while True:
            writer.write(b"a")
            await writer.drain()
            await asyncio.sleep(0.01)

    async with serving(drip, port=fetch_port) as server:
        asking = asyncio.create_task(client.ask(by_url(fetch_port), "What moves?", timeout_s=60))
        assert await settles(lambda: server.connections, 1)
        assert await settles(partial(open_files, stack), 1)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert await is_left(stack, server)
    await idle(stack)
