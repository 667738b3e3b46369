"""Bodies of the gateway's requests: broken, large, compressed, slow and unread ones."""

from __future__ import annotations

import asyncio
import base64
import gzip
import http.client
import json
import re
import time
import zlib
from contextlib import AsyncExitStack, closing
from functools import partial

import httpx

from tests import media
from tests.integration.conftest import MAX_INLINE_BYTES
from tests.integration.fleet import metric_in, until
from tests.integration.gateway import Gateway, question, video

CLIP = media.clip(16, fps=4)
RUNNING = "gridsieve_requests_running"
LARGER = "upload larger files to /v1/files, or give an https URL or a file: path below --media-root"


def test_broken_and_large_bodies_and_unknown_paths_have_a_status(http: httpx.Client) -> None:
    broken = http.post("/v1/chat/completions", content=b'{"messages": [')
    error = broken.json()["error"]
    assert (broken.status_code, error["message"][:26], error["param"]) == (400, "the body is not valid JSON", None)
    limit = MAX_INLINE_BYTES * 4 // 3 + 4 * 2**20
    pieces = (bytes(2**20) for _ in range(20))
    bomb = gzip.compress(bytes(20 * 2**20), 1)
    for body, encoding in ((pieces, "identity"), (bomb, "gzip")):
        large = http.post("/v1/chat/completions", content=body, headers={"content-encoding": encoding})
        assert (large.status_code, large.json()["error"]["code"]) == (413, "TOO_LARGE")
        told = (
            rf"the body has at least \d+ bytes, at most {limit} are allowed: --max-inline-bytes is {MAX_INLINE_BYTES}"
        )
        assert re.fullmatch(f"{told}; {LARGER}", large.json()["error"]["message"])
    assert http.get("/v1/moderations").status_code == 404
    assert http.get("/v1/chat/completions").status_code == 405


def test_a_body_is_refused_by_the_size_that_it_announces_and_then_read_to_its_end(door: Gateway) -> None:
    """A connection that was closed with bytes unread would be reset, and the answer lost."""
    with closing(http.client.HTTPConnection("127.0.0.1", door.port, timeout=30)) as connection:
        connection.putrequest("POST", "/v1/chat/completions")
        connection.putheader("content-length", str(20 * 2**20))
        connection.endheaders()
        refused = connection.getresponse()
        message = json.loads(refused.read())["error"]["message"]
        assert (refused.status, message[: message.index(",")]) == (413, f"the body has {20 * 2**20} bytes")
        assert message.endswith(LARGER)
        for _ in range(20):
            connection.sock.sendall(bytes(2**20))
        connection.request("GET", "/version")
        assert connection.getresponse().status == 200


def test_inline_media_above_their_limit_are_refused_with_what_to_do(http: httpx.Client) -> None:
    """In a body that is not too large: generation refuses them."""
    large = base64.b64encode(bytes(MAX_INLINE_BYTES + 1)).decode()
    body = json.dumps(question(video("data:;base64,"), "?")).replace(',"}}', f',{large}"}}}}')
    refused = http.post("/v1/chat/completions", content=body)
    told = f"messages hold {MAX_INLINE_BYTES + 1} bytes of inline media, --max-inline-bytes is {MAX_INLINE_BYTES}"
    assert (refused.status_code, refused.json()["error"]["message"]) == (400, f"{told}; {LARGER}")


def test_a_body_may_be_compressed_in_gzip_and_deflate_alone(http: httpx.Client) -> None:
    def sent(encoding: str, body: bytes) -> httpx.Response:
        return http.post("/v1/chat/completions", content=body, headers={"content-encoding": encoding})

    body = json.dumps(question("Why?")).encode()
    plain = http.post("/v1/chat/completions", content=body).json()["choices"]
    for encoding, compressed in (("gzip", gzip.compress(body)), ("Deflate", zlib.compress(body)), ("identity", body)):
        assert sent(encoding, compressed).json()["choices"] == plain
    for encoding in ("zstd", "gzip, gzip"):
        refused = sent(encoding, body)
        assert (refused.status_code, refused.headers["accept-encoding"]) == (415, "gzip, deflate")
        assert refused.json()["error"]["param"] == "Content-Encoding"
    for broken in (body, gzip.compress(body)[:-4], gzip.compress(body) * 2, b""):
        refused = sent("gzip", broken)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "INVALID_REQUEST")
    form = httpx.Request("POST", "http://x", files={"file": ("a.mp4", CLIP)})
    headers = {"content-type": form.headers["content-type"], "content-encoding": "gzip"}
    kept = http.post("/v1/files", content=gzip.compress(form.read()), headers=headers).json()
    assert kept["bytes"] == len(CLIP)
    http.delete(f"/v1/files/{kept['id']}")


async def test_slow_bodies_and_unread_streams_hold_nobody_up(door: Gateway) -> None:
    unread = json.dumps(question("Why?", max_tokens=400, ignore_eos=True, stream=True, logprobs=True, top_logprobs=20))
    post = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"

    async def drip(writer: asyncio.StreamWriter) -> None:
        writer.write(f"{post}content-length: 1000000\r\n\r\n".encode())
        while True:
            writer.write(b" ")
            await asyncio.sleep(0.05)

    async with AsyncExitStack() as slow, httpx.AsyncClient(base_url=door.url, timeout=60) as client:
        tasks = []
        for number in range(104):
            _, writer = await asyncio.open_connection("127.0.0.1", door.port, limit=1024)
            slow.callback(writer.close)
            if number < 100:
                tasks.append(asyncio.create_task(drip(writer)))
            else:  # its reader stops at the limit
                writer.write(f"{post}content-length: {len(unread)}\r\n\r\n{unread}".encode())
        running = partial(lambda: metric_in(httpx.get(f"{door.url}/metrics").text, RUNNING, method="ChatCompletions"))
        await until(lambda: running() >= 100)
        for _ in range(5):
            start = time.monotonic()
            (await client.post("/v1/chat/completions", json=question("Why?"))).raise_for_status()
            assert time.monotonic() - start < 5
        for task in tasks:
            task.cancel()
    await until(lambda: running() == 0)
