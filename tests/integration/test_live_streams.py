"""Live sessions that see encoded video and raw frames, through three real processes."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import pytest
from PIL import Image

from gridsieve.common.process import free_port
from gridsieve.v1 import generation_pb2, prompt_pb2
from gridsieve.v1.generation_pb2 import (
    SNAPSHOTS_ANSWERS,
    SNAPSHOTS_SLICES,
    STREAM_STATE_ENDED,
    STREAM_STATE_LOST,
    STREAM_STATE_PLAYING,
    WALL_CLOCK_CAMERA,
    WALL_CLOCK_SERVICE,
    WALL_CLOCK_UNSPECIFIED,
    LiveClip,
    LiveFrame,
    LiveStream,
    RawFrame,
)
from tests import media
from tests.cameras import camera
from tests.integration.fleet import Stack, exported, metric_in, running, until
from tests.integration.live import QUESTION, Watching, lines_with, watching
from tests.integration.test_metrics import documented, families, seen
from tests.preprocessing.media_server import head, serving
from tests.processes import children

PORT = free_port()
STREAMS = {form: media.stream(form) for form in ("fmp4", "mpegts")}
PASSWORD = "xyzzy-7"
PNG = media.picture(112, 112)


@pytest.fixture(scope="module")
def stack(checkpoints: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    passwords = tmp_path_factory.mktemp("secrets") / "netrc"
    passwords.write_text(f"machine localhost login user password {PASSWORD}\n")
    flags = {
        "generation": ("--kv-cache-tokens", "4096", "--live-tokens", "2048"),
        "preprocessing": (
            "--fetch-ports",
            f"80,{PORT}",
            "--allow-media-domain",
            "*,localhost=127.0.0.0/8,localhost=::1",
            "--media-credentials-file",
            str(passwords),
        ),
    }
    with running(checkpoints("qwen2_5_vl"), flags=flags) as made:
        yield made


async def until_state(live: Watching, state: int) -> LiveStream:
    """Reads up to this state of the stream."""
    while True:
        told: LiveStream = await live.until("stream")
        if told.state == state:
            return told


async def show(live: Watching, way: str, form: str, pause_s: float = 0.2) -> None:
    """Sends a video: as clips, cut anywhere, as its pictures or as pixels. pause_s: after each clip."""
    if way == "clip":
        for place in range(0, len(STREAMS[form]), 1777):
            await live.send(clip=LiveClip(data=STREAMS[form][place : place + 1777]))
            await asyncio.sleep(pause_s)  # otherwise newer slices would take the place of those that wait
        return
    for number, (time_s, pixels) in enumerate(media.shown(STREAMS[form])):
        height, width, _ = pixels.shape
        raw = RawFrame(width=width, height=height, rgb=pixels.tobytes())
        content: dict[str, Any] = {"picture": media.png(pixels)} if way == "picture" else {"raw": raw}
        await live.send(frame=LiveFrame(time_s=time_s, **content))
        if number % 2:
            await live.until("slice")


async def film(writer: asyncio.StreamWriter, enough: asyncio.Event) -> None:
    """Answers by HTTP with a stream that begins again until the event is set, and leaves the answer open."""
    writer.write(head(200, "Transfer-Encoding: chunked"))
    data = STREAMS["mpegts"]
    while not enough.is_set():
        for place in range(0, len(data), 1777):
            piece = data[place : place + 1777]
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("form", ["fmp4", pytest.param("mpegts", marks=pytest.mark.deep)])
async def test_clips_and_raw_frames_answer_as_their_frames_as_pictures(stack: Stack, form: str) -> None:
    """The question follows the last clip at once, and is about all that can be decoded until then."""
    answers = {}
    for way, pause_s in (("picture", 0.0), ("raw", 0.0), ("clip", 0.2), ("clip", 1.0)):
        async with watching(stack.address) as live:
            await show(live, way, form, pause_s)
            answers[way] = await live.ask(QUESTION)
            if pause_s == 0.2 and live.seen[-1].finished.usage.dropped_frames:
                continue  # a slower machine than this one: it is tried again, more slowly
            slices = [each.slice for each in live.seen if each.HasField("slice")]
            times_s = [time_s for each in slices for time_s in (each.first_time_s, each.last_time_s)]
            assert times_s == pytest.approx([time_s for time_s, _ in media.shown(STREAMS[form])], abs=1e-6)
            if way == "clip":
                await live.send(close={})
                await until_state(live, STREAM_STATE_ENDED)
                assert await live.call.read() is grpc.aio.EOF
                break
    tokens, logprobs = answers.pop("picture")
    for way, answer in answers.items():
        assert answer == (tokens, pytest.approx(logprobs, abs=1e-6)), way


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        ([{"clip": {"data": b"nonsense" * 999}}, {"close": {}}], "clip cannot be read as a video"),
        ([{"clip": {}}], "clip.data must be 1 to 16777216 bytes, got '0 bytes'"),
        ([{"frame": {"picture": PNG}}, {"clip": {"data": b"1"}}], "clip must not be sent: .* come by frame"),
    ],
)
async def test_bad_clips_are_refused(stack: Stack, sent: list[dict[str, Any]], why: str) -> None:
    async with watching(stack.address) as live:
        for each in sent:
            await live.send(**each)
        with pytest.raises(grpc.aio.AioRpcError, match=why) as refused:
            await live.until("finished")
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_bad_raw_frames_are_dropped_and_the_session_goes_on(stack: Stack) -> None:
    bad = {
        "frame.raw.rgb must be 12 bytes, 3 for each of": {"width": 2, "height": 2, "rgb": b"123"},
        "frame.raw.width must be at least 1, got 0": {"width": 0, "height": 2},
        "frame.raw has 4000×4000 pixels, at most 5592384": {"width": 4000, "height": 4000},
    }
    async with watching(stack.address) as live:
        for why, raw in bad.items():
            await live.send(frame={"raw": raw})
            dropped = await live.until("dropped")
            assert (dropped.frames, dropped.reason) == (1, generation_pb2.DROP_REASON_REFUSED)
            assert why in dropped.error
        await live.ask(QUESTION)
        assert live.seen[-1].finished.usage.frames == len(bad)


async def test_a_source_that_is_lost_is_opened_again_and_the_session_goes_on(stack: Stack) -> None:
    """A camera whose connection breaks off and whose clock begins again at 0, and which then ends."""
    seen = [asyncio.Event(), asyncio.Event()]  # of each connection: enough of it
    connections = iter(enumerate(seen))

    async def answer(writer: asyncio.StreamWriter) -> None:
        number, enough = next(connections)
        await film(writer, enough)
        writer.write(b"0\r\n\r\n" if number else b"")

    async with serving(answer, port=PORT), watching(stack.address, source=f"http://localhost:{PORT}/camera") as live:
        for _ in range(2):
            await live.until("slice")
        seen[0].set()
        lost = await until_state(live, STREAM_STATE_LOST)
        assert "open.source could not be fetched: the connection or the response broke off" in lost.reason
        assert (await live.ask(QUESTION))[0]
        for _ in range(2):
            await live.until("slice")
        seen[1].set()
        assert (await until_state(live, STREAM_STATE_ENDED)).reason == "the source came to its end"
        times_s = [each.slice.last_time_s for each in live.seen if each.HasField("slice")]
        assert times_s == sorted(times_s)
        assert (await live.ask(QUESTION))[0]
        await live.send(frame=LiveFrame(picture=PNG))
        with pytest.raises(grpc.aio.AioRpcError, match="frame must not be sent: this session's frames come by source"):
            await live.until("slice")


async def test_a_camera_that_restarts_with_another_size_is_opened_again_and_its_password_is_never_shown(
    stack: Stack,
) -> None:
    source, in_file = (f"rtsp://{login}localhost:{PORT}/live" for login in (f"user:{PASSWORD}@", ""))

    @asynccontextmanager
    async def filming(width: int) -> AsyncIterator[None]:
        picture = f"video/x-raw,format=I420,width={width},height=112,framerate=10/1"
        pipeline = f"videotestsrc is-live=true pattern=ball ! {picture} ! jpegenc ! rtpjpegpay name=pay0 pt=26"
        async with camera(mounts={"/live": pipeline}, users={"user": PASSWORD}, digest=True, port=PORT):
            yield

    async with AsyncExitStack() as session:
        async with filming(112):
            live = await session.enter_async_context(watching(stack.address, source=source))
            await live.until("slice")
        lost = await until_state(live, STREAM_STATE_LOST)
        assert "open.source could not be played: the connection broke off" in lost.reason
        async with filming(168):
            await live.until("restarted")
            await live.until("slice")
            assert (await live.ask(QUESTION))[0]
            async with watching(stack.address, source=in_file) as other:
                await other.until("slice")
    assert "the source of a live session was lost" in stack.log("generation")
    for name in stack.services:
        assert PASSWORD not in stack.log(name)
        assert PASSWORD not in exported(stack.metrics_ports[name])


@pytest.mark.deep
async def test_a_source_that_reopens_is_waited_for_played_to_its_end_and_played_again(stack: Stack) -> None:
    """A camera that films a still scene for 2.5 s each time: five frames, of which the last one has no partner. The
    first slice of each time is whole, and no slice is of two."""
    picture = "video/x-raw,format=I420,width=112,height=112,framerate=10/1"
    pipeline = (
        f"videotestsrc pattern=circular is-live=true num-buffers=25 ! {picture} ! jpegenc ! rtpjpegpay name=pay0 pt=26"
    )
    opened = {"source": f"rtsp://localhost:{PORT}/live", "reopens": True, "pruning": prompt_pb2.Pruning()}
    generation = stack.services["generation"]
    before_s = time.time()
    async with watching(stack.address, snapshots=SNAPSHOTS_SLICES, source_name="door", **opened) as live:
        assert "open.source cannot be connected to" in (await until_state(live, STREAM_STATE_LOST)).reason
        async with camera(mounts={"/live": pipeline}, port=PORT):
            for _ in range(2):
                await until_state(live, STREAM_STATE_PLAYING)
                assert generation.metric("gridsieve_generation_source_up", source="door") == 1
                assert (await until_state(live, STREAM_STATE_LOST)).reason == "the source came to its end"
        assert (await live.ask(QUESTION))[0]
        text = exported(generation.metrics_port)
    slices = [each.slice for each in live.seen if each.HasField("slice")]
    gaps_s = [after.first_time_s - before.last_time_s for before, after in pairwise(slices)]
    again = 1 + gaps_s.index(max(gaps_s))  # the first slice after the camera was opened again
    tokens = slices[0].grid.h * slices[0].grid.w
    assert [each.kept.shape[0] for each in slices] == [tokens * (place in (0, again)) for place in range(len(slices))]
    assert all(each.last_time_s - each.first_time_s < 1 for each in slices)
    usage = live.seen[-1].finished.usage
    assert usage.frames == usage.used_frames + usage.dropped_frames
    for name, labels, value in (
        ("up", {}, 0),
        ("reopened_total", {}, 1),
        ("frames_total", {}, usage.frames),
        ("dropped_frames_total", {}, usage.dropped_frames),
        ("tokens_total", {"pruning": "before"}, usage.media_tokens_full),
        ("tokens_total", {"pruning": "after"}, usage.media_tokens),
        ("lag_seconds_count", {}, len(slices)),
    ):
        assert metric_in(text, f"gridsieve_generation_source_{name}", source="door", **labels) == value, name
    ours = {name: family for name, family in families(text).items() if "_source_" in name}
    assert {name: seen(family, {"source"}) for name, family in ours.items()} == documented("sources")
    await until(lambda: "door" not in exported(generation.metrics_port))
    assert all(line["source_name"] == "door" for line in lines_with(stack, "source of a live session was lost")[-2:])
    finished = live.seen[-1].finished
    filmed_s = [each.wall_time_s for each in (*slices, finished)]
    assert filmed_s == sorted(filmed_s)
    assert before_s < filmed_s[0]
    assert filmed_s[-1] < time.time()
    assert {each.wall_clock for each in (*slices, finished)} <= {WALL_CLOCK_CAMERA, WALL_CLOCK_SERVICE}
    assert finished.snapshot == slices[-1].snapshot
    for each in slices:
        with Image.open(io.BytesIO(each.snapshot)) as shown:
            assert (shown.format, shown.size) == ("JPEG", (112, 112))


async def test_a_source_that_reopens_and_can_never_be_opened_ends_the_call(stack: Stack) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=r"open\.source_name must be at most 64 printable characters"):
        async with watching(stack.address, source="http://localhost/", source_name="n" * 65):
            pass
    for url, code in ((f"rtsp://127.0.0.1:{PORT}/x", "PERMISSION_DENIED"), ("rtsp://a b", "INVALID_ARGUMENT")):
        async with watching(stack.address, source=url, reopens=True) as live:
            with pytest.raises(grpc.aio.AioRpcError, match=r"open\.source") as refused:
                await live.until("slice")
            assert refused.value.code() is grpc.StatusCode[code]


async def test_answers_show_the_picture_that_the_caller_sent(stack: Stack) -> None:
    before_s = time.time()
    async with watching(stack.address, snapshots=SNAPSHOTS_ANSWERS) as live:
        await live.ask(QUESTION)
        assert live.seen[-1].finished.wall_clock == WALL_CLOCK_UNSPECIFIED
        await live.send(frame=LiveFrame(picture=PNG))
        await live.ask(QUESTION)
        [told] = [each.slice for each in live.seen if each.HasField("slice")]
        finished = live.seen[-1].finished
        assert (told.snapshot, finished.snapshot) == (b"", PNG)
        assert before_s < told.wall_time_s == finished.wall_time_s < time.time()
        assert told.wall_clock == finished.wall_clock == WALL_CLOCK_SERVICE


async def test_a_decoder_that_crashes_loses_its_stream_and_not_the_session(stack: Stack) -> None:
    preprocessing = stack.services["preprocessing"].pid
    before = set(children(preprocessing))
    async with watching(stack.address) as live:
        await live.send(clip=LiveClip(data=STREAMS["mpegts"][: len(STREAMS["mpegts"]) // 2]))
        await live.until("slice")
        [decoder] = set(children(preprocessing)) - before
        os.kill(decoder, signal.SIGSEGV)
        await live.send(clip=LiveClip(data=STREAMS["mpegts"][len(STREAMS["mpegts"]) // 2 :]))
        lost = await until_state(live, STREAM_STATE_LOST)
        assert "clip cannot be decoded: its decoder" in lost.reason
        assert (await live.ask(QUESTION))[0]
        await live.send(clip=LiveClip(data=STREAMS["mpegts"], begins=True))
        await live.until("slice")


async def test_clips_are_lost_with_preprocessing_and_begin_again(stack: Stack) -> None:
    preprocessing, data = stack.services["preprocessing"], STREAMS["fmp4"]
    async with watching(stack.address) as live:
        await show(live, "clip", "fmp4", pause_s=0)
        assert (await live.ask(QUESTION))[0]  # all that was shown is seen
        before = max(each.slice.last_time_s for each in live.seen if each.HasField("slice"))
        await asyncio.to_thread(preprocessing.kill)
        await until_state(live, STREAM_STATE_LOST)
        await asyncio.to_thread(preprocessing.start)
        await asyncio.to_thread(preprocessing.ready)
        while not (await live.ask(QUESTION))[0]:  # until generation's channel has connected again
            pass
        await live.send(clip=LiveClip(data=data[len(data) // 2 :]))  # of the stream that was lost
        sliced = asyncio.create_task(live.until("slice"))
        while not sliced.done():  # what the encoder cannot read yet is dropped
            await live.send(clip=LiveClip(data=data, begins=True))
            await asyncio.wait([sliced], timeout=1)
        assert (await sliced).first_time_s > before
        assert (await live.ask(QUESTION))[0]
