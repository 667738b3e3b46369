"""`gridsieve watch` as a process: real cameras, three real services, a webhook and a broker."""

from __future__ import annotations

import asyncio
import base64
import http.server
import io
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import av
import pytest
from cloudevents.core.formats.json import JSONFormat
from cloudevents.core.v1.event import CloudEvent
from paho.mqtt.client import Client
from paho.mqtt.enums import CallbackAPIVersion
from PIL import Image
from standardwebhooks import Webhook

from gridsieve.client.client import GridsieveClient
from gridsieve.common.process import free_port
from gridsieve.search.folder_search import FolderSearch
from tests.cameras import Camera, camera
from tests.certificates import Authority
from tests.integration.fleet import ROOT, Stack, media_port, until

PORT = media_port()
PASSWORD = "x/y z@7"
SECRET = "whsec_" + base64.b64encode(bytes(range(32))).decode()
SCHEMA = (
    '{type = "object", properties = {moves = {type = "boolean"}}, required = ["moves"], additionalProperties = false}'
)
ASKED = f"""
[[question]]
text = "What moves?"
every_s = 1
max_new_tokens = 64
schema = {SCHEMA}
"""


def filming() -> AbstractAsyncContextManager[Camera]:
    """The cameras yard and door."""
    picture = "video/x-raw,format=I420,width=112,height=112,framerate=10/1"
    pipeline = f"videotestsrc is-live=true pattern=ball ! {picture} ! jpegenc ! rtpjpegpay name=pay0 pt=26"
    mounts = dict.fromkeys(("/yard", "/door"), pipeline)
    return camera(mounts=mounts, users={"viewer": PASSWORD}, digest=True, port=PORT)


class Watch:
    """The command. said: its lines for people so far. events: its lines of JSON."""

    def __init__(self, stack: Stack, folder: Path, *flags: str, **variables: str) -> None:
        self.file = folder / "cameras.toml"
        self._out, self._err = folder / "out", folder / "err"
        command = [sys.executable, "-m", "gridsieve", "watch", str(self.file), "--server", stack.address, *flags]
        with self._out.open("wb") as out, self._err.open("wb") as err:
            environment = os.environ | variables
            self.process = subprocess.Popen(command, stdout=out, stderr=err, env=environment, cwd=ROOT)

    @property
    def said(self) -> str:
        return self._err.read_text()

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._out.read_text().splitlines(keepends=True) if line.endswith("\n")]

    async def says(self, text: str, times: int = 1) -> None:
        await until(lambda: self.said.count(text) >= times or self.process.poll() is not None)
        assert self.said.count(text) >= times, self.said

    async def tells(self, kind: str, name: str, after: int = 0) -> dict[str, Any]:
        """The first event of this type about a camera after so many events."""

        def found() -> list[dict[str, Any]]:
            return [each for each in self.events[after:] if (each["type"], each["subject"]) == (kind, name)]

        await until(lambda: found() or self.process.poll() is not None)
        assert found(), self.said
        return found()[0]


@pytest.fixture
def watch(live_stack: Stack, tmp_path: Path) -> Iterator[Callable[..., Watch]]:
    """Starts the command for the cameras yard and door (localhost), with more tables."""
    started: list[Watch] = []
    (tmp_path / "password").write_text(f"{PASSWORD}\n")

    def start(text: str, *flags: str, **variables: str) -> Watch:
        (tmp_path / "cameras.toml").write_text(text)
        started.append(Watch(live_stack, tmp_path, *flags, **variables))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.wait()


def table(name: str) -> str:
    return f"""
        [[camera]]
        name = "{name}"
        url = "rtsp://localhost:{PORT}/{name}"
        user = "viewer"
        password_file = "password"
        window_tokens = 512
        answer_tokens = 128
        """


class Hook(http.server.ThreadingHTTPServer):
    """Answers 500 once, then 200. requests: headers and body of each."""

    def __init__(self) -> None:
        self.requests: list[tuple[dict[str, str], bytes]] = []
        hook = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                hook.requests.append(({name.lower(): value for name, value in self.headers.items()}, body))
                self.send_response(500 if len(hook.requests) == 1 else 200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)


@contextmanager
def hook() -> Iterator[Hook]:
    with Hook() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@asynccontextmanager
async def broker(program: str, folder: Path, port: int) -> AsyncIterator[tuple[queue.Queue[Any], Path]]:
    """Mosquitto with TLS and a password. Yields the messages of all topics, and the authority of its certificate."""
    authority = Authority(folder)
    issued = authority.issue("localhost")
    passwords = folder / "passwords"
    subprocess.run(["mosquitto_passwd", "-b", "-c", passwords, "watcher", PASSWORD], check=True)
    settings = folder / "mosquitto.conf"
    settings.write_text(
        f"listener {port} 127.0.0.1\ncertfile {issued.cert}\nkeyfile {issued.key}\nallow_anonymous false\n"
        f"password_file {passwords}\nuser root\n"
    )
    process = subprocess.Popen([program, "-c", settings], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    messages: queue.Queue[Any] = queue.Queue()
    client = Client(CallbackAPIVersion.VERSION2)
    client.tls_set(str(authority.path))
    client.username_pw_set("watcher", PASSWORD)
    client.on_connect = lambda *_: client.subscribe("#", qos=1)
    client.on_message = lambda _, __, message: messages.put(message)
    client.connect_async("localhost", port)
    client.loop_start()
    try:
        await until(client.is_connected)
        yield messages, authority.path
    finally:
        client.disconnect()
        client.loop_stop()
        process.kill()
        process.wait()


async def test_answers_reach_a_webhook_that_fails_first_and_a_broker(
    watch: Callable[..., Watch], mosquitto: str, tmp_path: Path
) -> None:
    port = free_port()
    with hook() as server:
        sinks = f"""
            [[sink]]
            type = "webhook"
            url = "http://127.0.0.1:{server.server_port}/alerts/zyx"
            secret_env = "SECRET"
            snapshot = true
            [[sink]]
            type = "mqtt"
            host = "localhost"
            port = {port}
            topic = "site/{{camera}}/answers"
            tls = true
            user = "watcher"
            password_file = "password"
            """
        async with filming(), broker(mosquitto, tmp_path, port) as (messages, authority):
            text = table("yard") + ASKED + sinks
            running_watch = watch(text, SECRET=SECRET, SSL_CERT_FILE=str(authority))
            await until(lambda: len(server.requests) >= 4)
            running_watch.process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(running_watch.process.wait, 20) == 0, running_watch.said
    sent = [JSONFormat().read(CloudEvent, body) for _, body in server.requests]
    assert sent[0].get_id() == sent[1].get_id()  # it is tried again
    assert len({event.get_id() for event in sent}) == len(sent) - 1
    for headers, body in server.requests:
        Webhook(SECRET).verify(body, headers)
        assert headers["content-type"] == "application/cloudevents+json"
    plays, *answers = sent[1:]
    assert plays.get_type() == "gridsieve.camera.playing"
    for event in answers:
        assert (event.get_type(), event.get_subject()) == ("gridsieve.answer", "yard")
        data = event.get_data()
        assert (data["question"], data["finish_reason"]) == ("What moves?", "stop")
        assert isinstance(data["answer"]["moves"], bool)
        assert data["usage"]["media_tokens"] <= data["usage"]["media_tokens_full"]
        assert data["wall_clock"] in ("camera", "service")
        assert data["wall_time"] == event.get_time().isoformat(timespec="milliseconds").replace("+00:00", "Z")
        with Image.open(io.BytesIO(base64.b64decode(data["snapshot"]))) as picture:
            assert (picture.format, picture.size) == ("JPEG", (112, 112))
    by_broker = [messages.get(timeout=5) for _ in sent[1:]]
    assert {each.topic for each in by_broker} == {"site/yard/answers"}
    told = [json.loads(each.payload) for each in by_broker]
    assert [each["id"] for each in told] == [event.get_id() for event in sent[1:]]
    assert not any("snapshot" in each["data"] for each in told)
    assert "webhook 127.0.0.1: events wait: 500" in running_watch.said
    for text in ("x/y", "x%2Fy", SECRET, "zyx"):  # no hexadecimal digits, of which identifiers are made
        assert text not in running_watch.said
        assert text not in json.dumps(told)


@pytest.mark.deep
async def test_cameras_and_generation_are_waited_for(watch: Callable[..., Watch], live_stack: Stack) -> None:
    generation = live_stack.services["generation"]
    await asyncio.to_thread(generation.kill)
    running_watch = watch(table("yard") + ASKED, "--json")
    await running_watch.says("yard: lost: generation cannot be reached")
    await asyncio.to_thread(generation.start)
    await asyncio.to_thread(generation.ready)
    lost = await running_watch.tells("gridsieve.camera.lost", "yard", after=1)
    assert lost["data"]["reason"].startswith("the camera ")  # generation is there, the camera is not
    async with filming():
        await running_watch.tells("gridsieve.camera.playing", "yard")
        await running_watch.tells("gridsieve.answer", "yard")
        before = len(running_watch.events)
    await running_watch.tells("gridsieve.camera.lost", "yard", before)
    running_watch.process.send_signal(signal.SIGINT)
    assert await asyncio.to_thread(running_watch.process.wait, 20) == 0
    assert running_watch.said.count("yard: plays") == 1


async def test_a_changed_file_is_taken_over_and_what_is_equal_in_it_goes_on(watch: Callable[..., Watch]) -> None:
    yard, door = table("yard"), table("door")
    async with filming():
        running_watch = watch(yard + door + ASKED)
        await running_watch.says("door: opens")
        running_watch.file.write_text(yard + door + ASKED + "on_change = 2")
        await running_watch.says("is not taken over")
        await running_watch.says("yard: plays")
        await running_watch.says("door: plays")
        assert "question 1: on_change must be less than or equal to 1, got 2" in running_watch.said
        asked_of_door = '[[question]]\ntext = "Is it open?"\nevery_s = 1\nmax_new_tokens = 4\ncameras = ["door"]'
        running_watch.file.write_text(yard + door + ASKED + asked_of_door)
        await running_watch.says("door: plays", times=2)
        await until(lambda: "door: Is it open?" in running_watch._out.read_text())
        (running_watch.file.parent / "password").write_text("another")
        await running_watch.says("yard: lost")
    running_watch.process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(running_watch.process.wait, 20) == 0
    assert [running_watch.said.count(f"{name}: opens") for name in ("yard", "door")] == [2, 3]


async def test_what_a_camera_showed_is_in_an_index(watch: Callable[..., Watch], embeds: str, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    async with filming():
        running = watch(table("yard") + ASKED, "--json", "--index", str(folder), "--embedder", embeds)
        await running.tells("gridsieve.answer", "yard")
        running.process.terminate()
        assert await asyncio.to_thread(running.process.wait, 20) == 0, running.said
    film, *later = sorted((folder / "yard").glob("*.mp4"))
    with av.open(str(film)) as container:
        frames = [(each.width, each.height) for each in container.decode(video=0)]
    assert set(frames) == {(112, 112)}
    began = datetime.strptime(film.stem, "%Y-%m-%dT%H-%M-%S.%fZ").replace(tzinfo=UTC)
    assert abs(datetime.now(UTC) - began) < timedelta(minutes=2)
    async with GridsieveClient(embeds) as embedder, FolderSearch(folder, embedder) as index:
        found = await index.search("0", 100)
    assert {(each.path, each.start_s) for each in found} == {(f"yard/{each.name}", 0) for each in (film, *later)}
