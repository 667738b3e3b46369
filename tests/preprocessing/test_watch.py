"""Watch calls to a real service: streams of encoded video that come in pieces, by HTTP and by RTSP."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
import pytest

from gridsieve.services.preprocessing.workers.process import Fault
from gridsieve.v1.preprocessing_pb2 import WatchOpen, WatchRequest
from tests import media
from tests.preprocessing.media_server import MULTIPART, head, jpeg, ok, part_of, redirect, serving
from tests.preprocessing.service import Service, refused
from tests.preprocessing.worker_jobs import until
from tests.processes import children

pytestmark = pytest.mark.asyncio(loop_scope="session")

STREAMS = {form: media.stream(form) for form in ("fmp4", "mpegts")}


@dataclass
class Watched:
    """What a Watch call sent so far: times and pixels of frames, how many of them came before each `read_bytes`.

    filmed_s: of the last frame, if it has one.
    """

    call: Any
    frames: list[tuple[float, np.ndarray[Any, Any]]] = field(default_factory=list)
    filmed_s: float | None = None
    read: list[tuple[int, int]] = field(default_factory=list)
    pieces: list[bytes] = field(default_factory=list)

    async def next(self) -> bool:
        """Reads a response; False at the end."""
        response = await self.call.read()
        if response is grpc.aio.EOF:
            return False
        if response.HasField("read_bytes"):
            self.read.append((response.read_bytes, len(self.frames)))
            return True
        chunk = response.frame.chunk
        if not chunk.offset_bytes:
            self.time_s = response.frame.time_s
            self.filmed_s = response.frame.filmed_s if response.frame.HasField("filmed_s") else None
            self.pieces.clear()
        self.pieces.append(chunk.data)
        whole = b"".join(self.pieces)
        if len(whole) == np.prod(chunk.shape):
            self.frames.append((self.time_s, np.frombuffer(whole, np.uint8).reshape(chunk.shape)))
        return True


async def opened(stub: Any, url: str = "", fps: float = 2) -> Watched:
    call = stub.Watch()
    await call.write(WatchRequest(open=WatchOpen(fps=fps, url=url)))
    return Watched(call)


async def all_of(watched: Watched, pieces: Sequence[bytes] = ()) -> Watched:
    """Sends pieces, and reads to the end."""
    for piece in pieces:
        await watched.call.write(WatchRequest(data=piece))
    await watched.call.done_writing()
    while await watched.next():
        pass
    return watched


def cut(data: bytes, sizes: Sequence[int]) -> list[bytes]:
    """Pieces of these sizes, again and again."""
    pieces = []
    while data:
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(data[:size])
        data = data[size:]
    return pieces


def assert_shown(watched: Watched, data: bytes, moved_s: float = 0.0, within_s: float = 1e-6) -> None:
    """All frames at their times, which are later by so much."""
    expected = media.shown(data)
    times_s = [time_s - moved_s for time_s, _ in watched.frames]
    assert times_s == pytest.approx([time_s for time_s, _ in expected], abs=within_s)
    for (_, pixels), (_, whole) in zip(watched.frames, expected, strict=True):
        np.testing.assert_array_equal(pixels, whole)


def assert_some_shown(watched: Watched, data: bytes) -> None:
    """Of a source that does not wait, newer frames may take the place of others."""
    expected = dict(media.shown(data))
    for time_s, pixels in watched.frames:
        nearest = min(expected, key=lambda each: abs(each - time_s))
        np.testing.assert_array_equal(pixels, expected[nearest])


@pytest.mark.parametrize("form", STREAMS)
async def test_the_frames_of_pieces_are_those_of_the_whole_file(stub: Any, form: str) -> None:
    data = STREAMS[form]
    watched = await all_of(await opened(stub), cut(data, (1, 999, 188, 3, 4001)))
    assert_shown(watched, data)
    assert watched.read[-1][0] == len(data)


async def test_it_says_which_bytes_are_read_once_their_frames_are_sent(stub: Any) -> None:
    data = STREAMS["fmp4"]
    half = data.rindex(b"moof") - 4  # a fragment of a second ends there
    watched = await opened(stub)
    await watched.call.write(WatchRequest(data=data[:half]))
    while not watched.read:
        assert await watched.next()
    assert watched.read == [(half, len(watched.frames))]
    assert len(watched.frames) >= 4
    assert_shown(await all_of(watched, [data[half:]]), data)


@pytest.mark.parametrize(
    ("pieces", "why"),
    [
        ([b"<!---->" * 999], "data cannot be read as a video.*MPEG-TS, fragmented MP4"),
        (
            [b"#EXTM3U\n#EXTINF:2,\npart0.ts\n"],
            r"data is a playlist \(HLS\), which is not watched; name the stream itself",
        ),
        ([media.clip()[:200] + b"\0" * 5000], "data has no video stream"),
        ([b""], "data must be 1 to 2097152 bytes, got '0 bytes'"),
    ],
    ids=["comments of no playlist", "a playlist", "a broken header", "an empty piece"],
)
async def test_bad_bytes_are_refused_with_their_field(stub: Any, pieces: list[bytes], why: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=why) as failed:
        await all_of(await opened(stub), pieces)
    assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_hostile_clock_begins_at_0(stub: Any) -> None:
    data = bytearray(STREAMS["fmp4"])
    time = data.index(b"tfdt") + 8  # of the first fragment, in 8 bytes
    data[time : time + 8] = (2**61).to_bytes(8)
    watched = await all_of(await opened(stub), [bytes(data)])
    assert len(watched.frames) > 2
    assert watched.frames[0][0] == 0


async def test_a_decoder_that_crashes_ends_its_stream_alone(service: Service, stub: Any) -> None:
    data, before = STREAMS["mpegts"], set(children(os.getpid()))
    crashed = await opened(stub)
    await crashed.call.write(WatchRequest(data=data[: len(data) // 2]))
    while not crashed.frames:
        assert await crashed.next()
    [worker] = set(children(os.getpid())) - before
    other = await opened(stub)
    await other.call.write(WatchRequest(data=data[: len(data) // 2]))
    while not other.frames:
        assert await other.next()
    for url in ("", "http://nobody.test/"):  # which is not looked up
        with pytest.raises(grpc.aio.AioRpcError, match="2 streams are watched, and no more may be"):
            await all_of(await opened(stub, url))
    os.kill(worker, signal.SIGSEGV)
    # How it ended is not known yet if the next bytes cannot be sent to it.
    with pytest.raises(grpc.aio.AioRpcError, match=r"data cannot be decoded: its decoder (crashed|process)"):
        await all_of(crashed)
    assert_shown(await all_of(other, [data[len(data) // 2 :]]), data)
    assert service.queues.replaced == [Fault.CRASHED]
    service.queues.replaced.clear()
    await until(lambda: set(children(os.getpid())) == before)


# --- by URL -----------------------------------------------------------------------------------------------------


async def test_a_stream_by_http_is_watched_to_its_end(service: Service) -> None:
    data = STREAMS["mpegts"]

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(head(200))
        for piece in cut(data, (5000, 7)):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.01)  # a camera's: newer frames would replace those that wait

    async with serving(answer) as server, service.serving(server) as stub:
        watched = await all_of(await opened(stub, f"http://clip.test:{server.port}/camera"))
        last_s, _ = media.shown(data)[-1]  # no newer frame takes the place of that one
        assert watched.frames[-1][0] == pytest.approx(last_s, abs=0.1)
        assert_some_shown(watched, data)


async def test_pictures_by_http_have_the_times_at_which_they_come(service: Service) -> None:
    """MJPEG, as cameras send it to browsers. FFmpeg's own times would be those of 25 frames a second."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(head(200, MULTIPART))
        for number in range(5):
            writer.write(part_of(jpeg(number)))
            await writer.drain()
            await asyncio.sleep(0.3)

    async with serving(answer) as server, service.serving(server) as stub:
        watched = await all_of(await opened(stub, f"http://clip.test:{server.port}/"))
        assert 0.5 < watched.frames[-1][0] - watched.frames[0][0] < 20


@pytest.mark.parametrize(
    ("media_type", "body", "kind"),
    [
        ("application/vnd.apple.mpegurl", b"", "HLS"),
        ("application/dash+xml; charset=utf-8", b"", "DASH"),
        ("text/plain", b"\xef\xbb\xbf#EXTM3U\n#EXTINF:2,\npart0.ts\n", "HLS"),
        ("text/plain", b'<?xml version="1.0"?>\n<!-- by hand -->\n<MPD type="dynamic">', "DASH"),
    ],
)
async def test_playlists_are_refused_by_name(service: Service, media_type: str, body: bytes, kind: str) -> None:
    answer = ok(body, f"Content-Type: {media_type}")
    async with serving(answer) as server, service.serving(server) as stub:
        code, _, text = await refused((await opened(stub, f"http://clip.test:{server.port}/")).call)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert text.startswith(f"open.url is a playlist ({kind}), which is not watched; name the stream itself")
        assert server.connections == 1


@pytest.mark.parametrize(
    ("url", "code", "why"),
    [
        ("rtsp://10.0.0.7/x", "PERMISSION_DENIED", "open.url has no address that may be reached"),
        ("rtsp://clip.test:8554/x", "PERMISSION_DENIED", "open.url must have port"),
        (
            "file:///etc/passwd",
            "PERMISSION_DENIED",
            "open.url must start with http:// or https:// or rtsp",
        ),
        ("rtsp://a:b@c@clip.test/", "INVALID_ARGUMENT", "open.url must be rtsp://[user:password@]host"),
        ("rtsp://a%0d%0ab:c@clip.test/", "INVALID_ARGUMENT", "open.url has a user name or a password with control"),
        (f"rtsp://a:{'%40' * 42}@clip.test/", "INVALID_ARGUMENT", "of more than 127 characters together"),
    ],
)
async def test_urls_that_the_policy_forbids_are_refused(service: Service, url: str, code: str, why: str) -> None:
    async with serving(b"") as server, service.serving(server) as stub:
        refusal = await refused((await opened(stub, url.replace("10.0.0.7", f"10.0.0.7:{server.port}"))).call)
        assert refusal[0] is grpc.StatusCode[code]
        assert why in refusal[2]
        assert not server.connections


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (redirect("rtsp://clip.test/"), "redirects to an address that may not be reached"),
        (head(404), "was answered with status 404"),
    ],
)
async def test_servers_that_lead_elsewhere_or_refuse_are_left(service: Service, answer: bytes, why: str) -> None:
    async with serving(answer) as server, service.serving(server) as stub:
        code, _, text = await refused((await opened(stub, f"http://clip.test:{server.port}/")).call)
        assert code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.PERMISSION_DENIED)
        assert text.startswith("open.url ")
        assert why in text
        assert server.connections == 1
