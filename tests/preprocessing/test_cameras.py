"""Watch calls that play cameras, with GStreamer's RTSP server and with servers that misbehave."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import re
import signal
import socket
import ssl
import time
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import grpc
import numpy as np
import pytest

from benchmarks.clips import write_repeated
from gridsieve.common.contract.errors import MediaRejected
from gridsieve.services.preprocessing.fetch import login as logins
from gridsieve.services.preprocessing.fetch.fetcher import Fetcher
from gridsieve.services.preprocessing.video.stream import played_frames
from gridsieve.services.preprocessing.workers import streams
from gridsieve.services.preprocessing.workers.process import Fault
from gridsieve.services.preprocessing.workers.stream_room import StreamRoom
from tests.cameras import camera, played
from tests.certificates import Authority, self_signed
from tests.preprocessing.media_server import (
    Resolver,
    policy,
    serving,
)
from tests.preprocessing.service import Service, refused
from tests.preprocessing.test_watch import Watched, all_of, opened

pytestmark = pytest.mark.asyncio(loop_scope="session")

FPS = 25
LIVE = (
    "videotestsrc is-live=true pattern=ball ! video/x-raw,format=I420,width=64,height=48,framerate={} ! jpegenc ! "
    "rtpjpegpay name=pay0 pt=26"
)
CAMERA = {"/live": LIVE.format("25/1")}


def film(path: Path, codec: str, seconds: float, size_px: tuple[int, int] = (64, 96), **options: str) -> int:
    """Writes a film of noise that moves. Returns the bytes of its packets."""
    rng = np.random.default_rng(1)
    size_bytes = 0
    with av.open(str(path), "w", format="mp4") as container:
        track = container.add_stream(codec, rate=FPS, options=options)
        track.height, track.width = size_px
        track.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        track.codec_context.thread_count = 1
        for number in range(round(seconds * FPS) + 1):
            picture = rng.integers(0, 256, (*size_px, 3), np.uint8) if number < seconds * FPS else None
            frame = None if picture is None else av.VideoFrame.from_ndarray(picture, format="rgb24")
            for packet in track.encode(frame):
                size_bytes += packet.size
                container.mux(packet)
    return size_bytes


def assert_shown(watched: Watched, film: Path) -> None:
    """All frames are the film's, and between two of them as much time passes as in the film."""
    with av.open(str(film)) as container:
        times = {
            frame.to_ndarray(format="rgb24").tobytes(): frame.pts * frame.time_base
            for frame in container.decode(video=0)
        }
    film_s = [float(times[pixels.tobytes()]) for _, pixels in watched.frames]
    steps_s = np.diff(film_s)  # on a busy machine, newer frames may take the place of some
    assert ((steps_s > 0.4) & (steps_s < 1.6)).all()
    assert np.diff([time_s for time_s, _ in watched.frames]) == pytest.approx(steps_s, abs=0.002)


@asynccontextmanager
async def watching(
    service: Service,
    port: int,
    trusted: Path | None = None,
    own: dict[str, logins.Login] | None = None,
    **limits: float,
) -> AsyncIterator[tuple[Any, list[int]]]:
    """A stub of a service to which clip.test is 127.0.0.1, and the sizes of what it fetches."""
    came: list[int] = []
    tls = ssl.create_default_context(cafile=trusted) if trusted else None
    resolver = Resolver(clip_test=[["127.0.0.1"]])
    made = Fetcher(policy(port, **limits), resolver, tls, own, on_bytes=came.append)
    async with service.serving(fetcher=made) as stub:
        yield stub, came


@pytest.mark.parametrize(
    ("codec", "track", "seconds", "options"),
    [
        # 4 Mbit/s: FFmpeg answers every 280,000 bytes.
        ("libx264", "h264", 4, {"bf": "2", "preset": "ultrafast", "b": "4000000"}),
        pytest.param(
            *("libx265", "h265", 3, {"x265-params": "log-level=none:bframes=2:pools=none:frame-threads=1"}),
            marks=pytest.mark.deep,
        ),
    ],
)
async def test_a_film_is_played_to_its_end(
    service: Service, tmp_path: Path, codec: str, track: str, seconds: float, options: dict[str, str]
) -> None:
    path = tmp_path / "film.mp4"
    size_bytes = film(path, codec, seconds, (240, 320) if codec == "libx264" else (64, 96), **options)
    async with camera(mounts={"/film": played(path, track)}) as server, watching(service, server.port) as (stub, came):
        watched = await all_of(await opened(stub, f"rtsp://clip.test:{server.port}/film"))
        # Those of the first second come at once, and the newest takes the place of the others.
        watched.frames = [frame for frame in watched.frames if frame[0] > 0.9]
        assert_shown(watched, path)
        assert watched.frames[-1][0] > seconds - 1
        if codec == "libx264":
            assert sum(came) > 0.9 * size_bytes > 1_500_000


@pytest.mark.deep
@pytest.mark.timeout(900)
async def test_ten_minutes_have_no_gap(service: Service, tmp_path: Path) -> None:
    piece_s, pieces, bit_rate = 4, 150, 4_000_000
    piece, path = tmp_path / "piece.mp4", tmp_path / "film.mp4"
    film(piece, "libx264", piece_s, (240, 320), bf="2", preset="ultrafast", b=str(bit_rate))
    write_repeated(path, piece.read_bytes(), pieces, FPS)
    assert path.stat().st_size * 8 > 0.9 * bit_rate * piece_s * pieces
    with av.open(str(piece)) as container:
        numbers = {frame.to_ndarray(format="rgb24").tobytes(): n for n, frame in enumerate(container.decode(video=0))}
    served = camera(lasts_s=piece_s * pieces + 60, mounts={"/film": played(path, "h264")})
    async with served as server, watching(service, server.port) as (stub, came):
        watched = await opened(stub, f"rtsp://clip.test:{server.port}/film")
        shown: list[tuple[float, int]] = []
        while await watched.next():
            for time_s, pixels in watched.frames:
                shown.append((time_s, numbers[pixels.tobytes()]))
            watched.frames.clear()
        shown = [frame for frame in shown if frame[0] > 0.9]  # those of the first second come at once
        steps_s = np.diff([time_s for time_s, _ in shown])
        # Two frames a second; on a busy machine a newer one may take the place of one.
        assert ((steps_s > 0.4) & (steps_s < 1.6)).all()
        film_s = np.diff([number / FPS for _, number in shown]) % piece_s
        assert film_s == pytest.approx(steps_s, abs=0.002)
        assert shown[-1][0] > piece_s * pieces - 1
        assert sum(came) > 0.9 * path.stat().st_size
        print(f"{len(shown)} frames, {sum(came):,} bytes, longest step {steps_s.max():.3f} s")


async def test_of_several_tracks_the_video_is_watched(service: Service, tmp_path: Path) -> None:
    path = tmp_path / "film.mp4"
    film(path, "libx264", 3, bf="2")
    sound = "audiotestsrc is-live=true ! audioconvert ! voaacenc ! aacparse ! rtpmp4gpay pt=97 name=pay0"
    video = played(path, "h264").replace("pay0", "pay1")
    mounts = {"/film": f"{sound} {video}"}
    async with camera(mounts=mounts) as server, watching(service, server.port) as (stub, _):
        watched = await first_frame(stub, f"rtsp://clip.test:{server.port}/film")
        while len(watched.frames) < 4:
            assert await watched.next()
        watched.frames = watched.frames[1:]
        assert_shown(watched, path)
        watched.call.cancel()


async def first_frame(stub: Any, url: str) -> Watched:
    watched = await opened(stub, url)
    while not watched.frames:
        assert await watched.next()
    return watched


async def test_a_camera_gets_its_password_from_the_url_or_from_the_file_and_nobody_else_does(
    service: Service, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """By Basic. By Digest: a camera in integration/test_live_streams.py."""
    file = tmp_path / "netrc"
    file.write_text('machine clip.test login "us er" password "S3cr@t:word"\n')
    async with camera(mounts=CAMERA, users={"us er": "S3cr@t:word"}) as server:
        url = f"rtsp://{{}}clip.test:{server.port}/live?a@b"
        async with watching(service, server.port) as (stub, _):
            (await first_frame(stub, url.format("us%20er:S3cr%40t%3Aword@"))).call.cancel()
            for login, why in (
                ("us%20er:S3cr%40t@", "open.url asks for another user name or password"),
                ("", "open.url asks for a user name and a password; name them: rtsp://user:password@host/path"),
            ):
                code, _, text = await refused((await opened(stub, url.format(login))).call)
                assert (code, text) == (grpc.StatusCode.INVALID_ARGUMENT, why)
        async with watching(service, server.port, own=logins.logins_of(file)) as (stub, _):
            (await first_frame(stub, url.format(""))).call.cancel()
    shown = capfd.readouterr()
    assert "Watch" in shown.out
    assert "S3cr" not in shown.out + shown.err


async def test_an_encrypted_camera_must_have_a_certificate_of_its_name_that_is_trusted_as_by_https(
    service: Service, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    authority = Authority(tmp_path)
    own = self_signed(tmp_path, "clip.test")
    for issued, trusted, valid in (
        (authority.issue("clip.test"), authority.path, True),
        (authority.issue("other.test"), authority.path, False),
        (own, own.cert, True),
    ):
        wanted = {"mounts": CAMERA, "cert": str(issued.cert), "key": str(issued.key)}
        async with camera(**wanted) as server, watching(service, server.port, trusted) as (stub, _):
            url = f"rtsps://clip.test:{server.port}/live"
            if valid:
                (await first_frame(stub, url)).call.cancel()
                continue
            _, _, text = await refused((await opened(stub, url)).call)
            assert text == "open.url cannot be connected to, or has no valid certificate"
    assert "certificate is not valid for" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("number", "why"),
    [
        (signal.SIGKILL, "could not be played: the connection broke off"),
        pytest.param(signal.SIGSTOP, "has sent no video for 3 s", marks=pytest.mark.deep),
    ],
)
async def test_a_camera_that_is_lost_or_silent_is_left(service: Service, number: signal.Signals, why: str) -> None:
    async with camera(mounts=CAMERA) as server, watching(service, server.port, total_s=3.0) as (stub, _):
        watched = await first_frame(stub, f"rtsp://clip.test:{server.port}/live")
        os.kill(server.pid, number)
        code, _, text = await refused(watched.call)
        assert (code, text) == (grpc.StatusCode.INVALID_ARGUMENT, f"open.url {why}")
    gc.collect()  # the error's traceback holds the last frame


async def test_frames_have_the_time_of_the_cameras_clock_unless_that_is_wrong(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GStreamer sends its first report after some seconds."""
    async with camera(mounts=CAMERA) as server, watching(service, server.port) as (stub, _):
        watched = await first_frame(stub, f"rtsp://clip.test:{server.port}/live")
        assert watched.filmed_s is None
        while watched.filmed_s is None:
            assert await watched.next()
        assert watched.filmed_s == pytest.approx(time.time(), abs=2)
        before_s, first_s = watched.filmed_s, watched.time_s
        assert await watched.next()
        assert watched.filmed_s - before_s == pytest.approx(watched.time_s - first_s, abs=0.01)
        monkeypatch.setattr(streams, "_MOST_WRONG_S", 0)
        for _ in range(2):  # one may be on its way
            assert await watched.next()
        assert watched.filmed_s is None
        watched.call.cancel()
        assert await server.said.readline() == b"TEARDOWN\n"  # the camera is told that nobody watches any more


@pytest.mark.deep
async def test_a_camera_may_be_quiet_for_longer_than_a_decoder_may_work(service: Service) -> None:
    quick = replace(service.queues.streams._limits, stall_s=2.0)
    one = streams.StreamWorkers(StreamRoom(1), quick, service.queues.replaced.append)
    queues = replace(service.queues, streams=one)
    async with (
        camera(mounts={"/live": LIVE.format("1/3")}) as server,
        watching(replace(service, queues=queues), server.port, total_s=6.0) as (stub, _),
    ):
        watched = await first_frame(stub, f"rtsp://clip.test:{server.port}/live")
        assert await watched.next()
        assert watched.frames[-1][0] - watched.frames[-2][0] == pytest.approx(3, abs=0.1)
        watched.call.cancel()


async def test_frames_have_the_size_and_the_aspect_that_they_were_sent_with(service: Service) -> None:
    part = (
        "videotestsrc pattern=ball num-buffers={} ! "
        "video/x-raw,width={},height=48,framerate=25/1,pixel-aspect-ratio={} ! "
        "x264enc bframes=2 b-adapt=false ! video/x-h264,profile=main ! joined. "
    )
    parts = (part.format(*each) for each in ((30, 64, "1/1"), (15, 96, "1/1"), (15, 64, "2/1")))
    joined = "concat name=joined ! h264parse config-interval=-1 ! rtph264pay name=pay0 pt=96"
    mounts = {"/film": f"{joined} {' '.join(parts)}"}
    async with camera(mounts=mounts) as server, watching(service, server.port) as (stub, _):
        watched = await all_of(await opened(stub, f"rtsp://clip.test:{server.port}/film", fps=25))
        widths = [pixels.shape[1] for _, pixels in watched.frames]
        assert sorted(set(widths), key=widths.index) == [64, 96, 128]


REDIRECTION = "RTSP/1.0 302 X\r\nCSeq: 1\r\nLocation: rtsp://127.0.0.1:{}/\r\n\r\n"
# A name that is not UTF-8.
DESCRIPTION = b"v=0\r\ns=caf\xe9\r\nm=audio 0 RTP/AVP 8\r\n"
DESCRIBED = b"RTSP/1.0 200 OK\r\nContent-Type: application/sdp\r\nContent-Length: %d\r\n\r\n%b"


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (REDIRECTION, "redirects to another address, which is not followed"),
        (b"RTSP/1.0 404 X\r\nCSeq: 1\r\n\r\n", "cannot be played: .*404"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n", "could not be played: the connection broke off"),
    ],
)
async def test_servers_that_lead_elsewhere_or_refuse_are_left(service: Service, answer: bytes | str, why: str) -> None:
    async with serving(b"") as elsewhere:
        sent = answer.format(elsewhere.port).encode() if isinstance(answer, str) else answer
        async with serving(sent) as server, service.serving(server) as stub:
            code, _, text = await refused((await opened(stub, f"rtsp://clip.test:{server.port}/")).call)
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert re.fullmatch(f"open.url {why}.*", text)
            assert (server.connections, elsewhere.connections) == (1, 0)


async def test_a_camera_without_video_is_refused_and_targets_are_sent_whole(service: Service) -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        for each in (b"", DESCRIPTION, b""):  # to OPTIONS, DESCRIBE and PLAY
            writer.write(DESCRIBED % (len(each), each))
        await writer.drain()
        await asyncio.Event().wait()

    async with serving(answer) as server, service.serving(server) as stub:
        url = f"rtsp://clip.test:{server.port}/{2045 * 'a'}"
        for target, why in (
            ("b", "has no video stream"),
            ("bc", "must have a path and a query of at most 2047 characters"),
        ):
            _, _, text = await refused((await opened(stub, url + target)).call)
            assert text == f"open.url {why}"
        assert server.requests[0].split()[1].endswith("ab")


async def test_ffmpeg_follows_no_redirect_by_itself() -> None:
    """Nothing confines it here, and no bridge looks at what comes."""
    async with serving(b"") as elsewhere, serving(REDIRECTION.format(elsewhere.port).encode()) as server:
        url = f"rtsp://user:S3cret@127.0.0.1:{server.port}/"
        with pytest.raises(MediaRejected, match=r"^url cannot be played: ") as refusal:
            await asyncio.to_thread(next, played_frames(url, 2, "url"))
        assert "S3cret" not in "".join(traceback.format_exception(refusal.value))
        assert (server.connections, elsewhere.connections) == (1, 0)


async def test_a_server_that_sends_by_udp_alone_is_refused(service: Service) -> None:
    async with (
        camera(mounts=CAMERA, udp=True) as server,
        watching(service, server.port) as (stub, _),
    ):
        _, _, text = await refused((await opened(stub, f"rtsp://clip.test:{server.port}/live")).call)
        assert text.startswith("open.url cannot be played: ")


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("/hang", "open.url cannot be decoded: it made no progress for 1 s"),
        ("/flood", "open.url cannot be decoded: its decoder failed"),
        ("/reach{}", r"open.url reaches \['EACCES', 'ECONNREFUSED', 'EINVAL', 'EINVAL'\]"),
    ],
)
async def test_a_decoder_that_was_taken_over_is_ended_and_reaches_nothing(
    service: Service, monkeypatch: pytest.MonkeyPatch, target: str, why: str
) -> None:
    if "reach" in target and ctypes.CDLL(None).syscall(444, None, 0, 1) < 4:  # landlock_create_ruleset: its version
        pytest.skip("this kernel's Landlock knows no ports")
    monkeypatch.setattr(streams, "_CAMERA_WORKER", "tests.preprocessing.misbehaving_camera_worker")
    quick = replace(service.queues.streams._limits, stall_s=1.0)
    faults: list[Fault] = []
    queues = replace(service.queues, streams=streams.StreamWorkers(StreamRoom(1), quick, faults.append))

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while True:
                writer.write(bytes(2**16))
                await writer.drain()

    server = await asyncio.start_server(flood, "127.0.0.1", 0)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = server.sockets[0].getsockname()[1]
        async with server, watching(replace(service, queues=queues), port) as (stub, _):
            url = f"rtsp://clip.test:{port}{target.format(other.getsockname()[1])}"
            _, _, text = await refused((await opened(stub, url)).call)
            assert re.fullmatch(why, text)
            assert faults == {"/hang": [Fault.SLOW], "/flood": [Fault.CONTRACT]}.get(target, [])
