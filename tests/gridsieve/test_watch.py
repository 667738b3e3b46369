"""`gridsieve watch`: what a file of cameras may say, and what becomes of events that no sink takes."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from typer.testing import Result

from gridsieve.common.process import free_port
from gridsieve.watch.cameras import Webhook
from gridsieve.watch.events import ANSWER, Event
from gridsieve.watch.outbox import MAX_WAITING_BYTES, Letter, Outbox
from gridsieve.watch.stdout import StdoutSender
from gridsieve.watch.webhook import WebhookSender

ROOT = Path(__file__).parents[2]
SECRET = "hunter2"
CAMERA = '[[camera]]\nname = "yard"\nurl = "rtsp://yard.lan/live"\n'
QUESTION = '[[question]]\ntext = "Who?"\nevery_s = 5\n'
WEBHOOK = '[[sink]]\ntype = "webhook"\nurl = "https://alerts.example.org"\n'

Run = Callable[..., Result]


def test_the_example_is_a_file_of_cameras_whose_passwords_are_not_shown(
    gridsieve: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CAMERA_PASSWORD", "MQTT_PASSWORD"):
        monkeypatch.setenv(name, SECRET)
    monkeypatch.setenv("WEBHOOK_SECRET", 32 * "A")
    result = gridsieve("watch", str(ROOT / "examples" / "cameras.toml"), "--check")
    assert result.exit_code == 0, result.stderr
    assert "yard: rtsp://yard.lan/stream1, 2 questions" in result.stderr
    assert SECRET not in result.output + result.stderr


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (CAMERA + "fps = -1\n" + QUESTION, "camera 1 (yard): fps must be greater than 0, got -1"),
        (
            CAMERA + f'password = "{SECRET}"\n' + QUESTION,
            "camera 1 (yard): password is not known here; known are user,",
        ),
        (CAMERA + 'user = "me"\npassword_file = "none"\n' + QUESTION, "camera 1 (yard): password_file none"),
        (
            CAMERA + 'password_env = "UNSET"\n' + QUESTION,
            "camera 1 (yard): password_env names the variable UNSET, which",
        ),
        (CAMERA.replace("rtsp:", "rtmp:") + QUESTION, "camera 1 (yard): url must be rtsp:// or rtsps:// or http:// or"),
        (
            CAMERA.replace("yard", "a/b") + QUESTION,
            "camera 1 (a/b): name must be 1 to 64 characters without /, + and #",
        ),
        (CAMERA + CAMERA + QUESTION, "camera 2 (yard): name must be unique"),
        (
            CAMERA + 'user = "me"\npassword_env = "LATIN1"\n' + QUESTION,
            "camera 1 (yard): password_env names the variable LATIN1, which must hold one line of UTF-8",
        ),
        (CAMERA + QUESTION + 'cameras = ["door"]\n', "question 1: cameras must name some of yard, got 'door'"),
        (CAMERA + 17 * QUESTION, "camera 1 (yard): must be asked 1 to 16 questions, got 17"),
        (CAMERA + '[[question]]\ntext = "Who?"\n', "question 1: every_s or on_change must be set"),
        (CAMERA + QUESTION + 'schema = "none.json"\n', "question 1: schema none.json"),
        (CAMERA + QUESTION + WEBHOOK + 'secret_env = "SHORT"\n', "sink 1 (webhook): secret must be base64 of 24 to 64"),
        (CAMERA + QUESTION + '[[sink]]\ntype = "kafka"\n', "sink 1: type must be stdout, webhook or mqtt"),
        (
            CAMERA + QUESTION + WEBHOOK.replace("org", f"org/{SECRET}").replace("[[sink]]", "[sink]"),
            "written as [[sink]]",
        ),
        (
            CAMERA + QUESTION + f'[[sink]]\ntype = "mqtt"\nhost = "mqtt://me:{SECRET}@broker.lan"\n',
            "sink 1: host must be a name or an address, got",
        ),
        (CAMERA + "fps = 1.\n", "is not TOML: Expected newline or end of document after a statement (at line 4"),
        ("", "camera must be set\n"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_its_table_and_limit(
    gridsieve: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHORT", SECRET)
    monkeypatch.setenv("LATIN1", "caf\udce9")
    Path("cameras.toml").write_text(text)
    result = gridsieve("watch", "cameras.toml", "--check")
    assert result.exit_code == 2
    assert result.stderr.startswith("STARTUP: cameras.toml"), result.stderr
    assert told in result.stderr
    assert SECRET not in result.stderr


async def test_a_sink_that_is_away_holds_64_mib_and_what_is_dropped_is_counted_and_told() -> None:
    """The oldest events of the camera with the most go; each camera's first is being delivered."""
    said: list[str] = []
    async with asyncio.TaskGroup() as group:
        sender = WebhookSender(Webhook(f"http://127.0.0.1:{free_port()}/{SECRET}", None, snapshot=True))
        outbox = Outbox(sender, True, said.append, group)
        events = [Event(ANSWER, name, datetime.now(UTC), {}, bytes(2**20)) for name in 5 * ["door"] + 60 * ["yard"]]
        size = len(events[0].json(True))
        for event in events:
            outbox.put(event)
        fit = MAX_WAITING_BYTES // size
        assert (outbox.dropped, fit) == (len(events) - fit, 47)
        await asyncio.sleep(0.5)
        assert await outbox.close(0.1) == len(events)
    assert said[0] == "webhook 127.0.0.1: drops the oldest events: 64 MiB wait"
    assert said[1].startswith("webhook 127.0.0.1: events wait: ")
    assert said[2:] == [f"webhook 127.0.0.1: {fit} events were not delivered"]
    assert not any(SECRET in each for each in said)


async def test_a_reader_of_stdout_that_does_not_read_holds_up_its_lines_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as read, os.fdopen(writing, "w", encoding="utf-8") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        sender, letters = StdoutSender(), [Letter(name, name, name.encode() * 2**20) for name in "ab"]
        sent = asyncio.gather(*(sender.deliver(each) for each in letters))
        await asyncio.sleep(0.1)
        assert not sent.done()
        lines = [await asyncio.to_thread(read.readline) for _ in letters]
        await sent
    assert lines == [each.body + b"\n" for each in letters]


def test_an_error_is_a_line_of_json_for_machines(gridsieve: Run) -> None:
    result = gridsieve("watch", "/nowhere.toml", "--json")
    told = {"reason": "STARTUP", "message": "/nowhere.toml: No such file or directory"}
    assert (result.exit_code, json.loads(result.stdout)) == (2, {"error": told})
