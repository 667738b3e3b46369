"""`gridsieve batch` against a hand-written gateway: what it sends, the rows that it writes, and how a run continues."""

from __future__ import annotations

import asyncio
import base64
import json
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from gridsieve.jobs import job
from gridsieve.jobs.job import Job
from gridsieve.jobs.lines import Line, Reply, Row
from gridsieve.jobs.requests import FileRequests
from tests.gridsieve.conftest import COMMAND, SIGINT_IGNORED
from tests.gridsieve.fake_gateway import USAGE, WRONG, FakeGateway, serving

Run = Callable[..., Result]


@pytest.fixture
def gateway() -> FakeGateway:
    return FakeGateway()


@pytest.fixture
def url(gateway: FakeGateway) -> Iterator[str]:
    with serving(gateway) as url:
        yield url


@pytest.fixture
def batch(gridsieve: Run, url: str, tmp_path: Path) -> Run:
    def run(*arguments: str) -> Result:
        return gridsieve("batch", *arguments, "-o", str(tmp_path / "answers.jsonl"), "--gateway", url)

    return run


def requests(folder: Path, *questions: str, **fields: Any) -> str:
    """A file with these questions, whose ids are 0, 1, …"""
    path = folder / "requests.jsonl"
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body(question, **fields)}
        for number, question in enumerate(questions)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def body(question: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}], **fields}


def rows(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]


def ids(folder: Path) -> list[str]:
    return [row["custom_id"] for row in rows(folder)]


def test_a_question_is_asked_about_each_clip_of_a_folder(batch: Run, gateway: FakeGateway, tmp_path: Path) -> None:
    for name in ("clips/a.mp4", "clips/more/b.webm", "clips/c.png", "clips/notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    (tmp_path / "found.json").write_text('{"type": "object"}')
    table = ("--folder", str(tmp_path / "clips"), "-q", "What moves?", "--schema", str(tmp_path / "found.json"))
    result = batch(*table, "--pruning-rate", "0.75", "--max-new-tokens", "9", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    sums = json.loads(result.stdout)
    assert (sums["answered"], sums["failed"], sums["prompt_tokens"], sums["completion_tokens"]) == (3, 0, 30, 9)
    by_id = {row["custom_id"]: row for row in rows(tmp_path)}
    assert sorted(by_id) == ["a.mp4", "c.png", "more/b.webm"]
    answer = {"choices": [{"message": {"content": "What moves?"}}], "usage": USAGE}
    assert by_id["a.mp4"]["response"] == {"status_code": 200, "request_id": "r1", "body": answer}
    assert by_id["a.mp4"]["error"] is None
    sent = {asked["messages"][0]["content"][0]["type"]: asked for asked in gateway.asked}
    picture = f"data:image/png;base64,{base64.b64encode(b'clips/c.png').decode()}"
    question = [{"type": "image_url", "image_url": {"url": picture}}, {"type": "text", "text": "What moves?"}]
    assert sent["image_url"] == {
        "service_tier": "flex",
        "messages": [{"role": "user", "content": question}],
        "pruning": {"rate": 0.75},
        "max_completion_tokens": 9,
        "response_format": {"type": "json_schema", "json_schema": {"name": "found", "schema": {"type": "object"}}},
    }


def test_a_folder_on_the_server_is_sent_as_paths(batch: Run, gateway: FakeGateway, tmp_path: Path) -> None:
    (tmp_path / "one clip.mp4").touch()
    assert batch("--folder", str(tmp_path), "-q", "?", "--on-server").exit_code == 0
    (asked,) = gateway.asked
    assert asked["messages"][0]["content"][0]["video_url"]["url"] == f"file://{tmp_path}/one%20clip.mp4"


def test_failures_are_rows_with_their_reason(batch: Run, tmp_path: Path) -> None:
    result = batch(requests(tmp_path, "?", "wrong", "status 500"), "--ordered")
    assert result.exit_code == 1
    assert result.stderr.startswith("1 answered in ")
    assert result.stderr.endswith("the first failure: 1: temperature must be at least 0, got -1\n")
    fine, wrong, broken = rows(tmp_path)
    assert fine["response"]["status_code"] == 200
    assert wrong["response"] == {"status_code": 400, "request_id": "r1", "body": WRONG}
    assert broken["response"]["status_code"] == 500
    again = batch(requests(tmp_path, "?", "wrong", "status 500"), "--json")
    assert json.loads(again.stdout)["done_before"] == 3


def test_what_the_output_has_is_not_asked_again_and_a_torn_row_is(
    batch: Run, gateway: FakeGateway, tmp_path: Path
) -> None:
    path = requests(tmp_path, "a", "b", "c")
    assert batch(path, "--ordered").exit_code == 0
    output = tmp_path / "answers.jsonl"
    first, second, _ = output.read_text().splitlines(keepends=True)
    output.write_text(first + second[: len(second) // 2])
    gateway.asked.clear()
    assert batch(path, "--ordered").exit_code == 0
    assert sorted(gateway.questions) == ["b", "c"]  # both are in flight at once
    assert output.read_text().startswith(first)
    assert ids(tmp_path) == ["0", "1", "2"]


def test_a_last_row_without_its_line_break_is_done(batch: Run, gateway: FakeGateway, tmp_path: Path) -> None:
    path = requests(tmp_path, "a", "b")
    batch(path, "--ordered")
    output = tmp_path / "answers.jsonl"
    output.write_text(output.read_text().splitlines()[0])
    gateway.asked.clear()
    batch(path)
    assert gateway.questions == ["b"]
    assert ids(tmp_path) == ["0", "1"]


def test_ctrl_c_keeps_what_is_answered_and_the_next_run_asks_the_rest(
    batch: Run, gateway: FakeGateway, url: str, tmp_path: Path
) -> None:
    path = requests(tmp_path, "a", "hang", "b")
    command = [*SIGINT_IGNORED, *COMMAND, "batch", path, "-o", str(tmp_path / "answers.jsonl"), "--gateway", url]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        assert gateway.hangs.wait(30)
        while len(rows(tmp_path)) < 2:
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
    gateway.goes_on.set()
    assert batch(path).exit_code == 0
    assert Counter(gateway.questions) == {"a": 1, "b": 1, "hang": 2}
    assert sorted(ids(tmp_path)) == ["0", "1", "2"]


def test_rows_are_in_the_order_of_the_requests_or_as_they_are_answered(batch: Run, tmp_path: Path) -> None:
    path = requests(tmp_path, "after 0.4", "after 0.2", "after 0")
    batch(path)
    assert ids(tmp_path) == ["2", "1", "0"]
    (tmp_path / "answers.jsonl").unlink()
    batch(path, "--ordered")
    assert ids(tmp_path) == ["0", "1", "2"]


async def test_as_many_requests_are_in_flight_as_the_services_take(tmp_path: Path) -> None:
    asked = FileRequests.read(Path(requests(tmp_path, *["?"] * 400)))
    found: list[Row] = []
    running, most, refused = 0, 0, 0

    async def ask(line: Line) -> Reply:
        nonlocal running, most, refused
        if running == 20:
            refused += 1
            return Reply(429, "", {}, retry_after_s=0.1)
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.05)
        running -= 1
        return Reply(200, "", {})

    await Job(asked, ask, found.append).run(range(400))
    assert len(found) == 400
    assert most == 20
    assert 0 < refused < 100


def test_a_service_that_is_gone_ends_the_run_only_where_nothing_is_answered(
    batch: Run, gateway: FakeGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "PATIENCE_S", 0.5)
    monkeypatch.setattr(job, "_PAUSE_S", 0.2)
    result = batch(requests(tmp_path, "status 503"), "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout) == {"error": {"reason": "UNAVAILABLE", "message": "it is 503"}}
    assert rows(tmp_path) == []
    assert batch(requests(tmp_path, "status 503", *["after 0.3"] * 40)).exit_code == 1
    assert len(gateway.asked) > 41
    failed = {row["custom_id"] for row in rows(tmp_path) if row["response"]["status_code"] == 503}
    assert (failed, len(rows(tmp_path))) == ({"0"}, 41)


def test_a_caller_that_the_gateway_does_not_know_ends_the_run(batch: Run, tmp_path: Path) -> None:
    result = batch(requests(tmp_path, "status 401"))
    assert (result.exit_code, result.stderr) == (1, "UNAUTHENTICATED: it is 401\n")
    assert rows(tmp_path) == []


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "line 2: the line is not JSON: EOF"),
        ('{"method": "POST", "url": "/v1/responses", "body": {}}', "line 2: custom_id must be set"),
        (
            '{"custom_id": "0", "method": "POST", "url": "/v1/responses", "body": {}}',
            "line 2: custom_id '0' is that of line 1, too",
        ),
        (
            '{"custom_id": "1", "method": "POST", "url": "/v1/files", "body": {}}',
            "line 2: url is wrong: input should be",
        ),
        (
            '{"custom_id": "1", "method": "POST", "url": "/v1/responses", "body": {"stream": true}}',
            "line 2: body.stream must not be true: a row has a whole answer",
        ),
    ],
)
def test_a_wrong_line_is_refused_before_anything_is_asked(
    batch: Run, gateway: FakeGateway, tmp_path: Path, line: str, told: str
) -> None:
    path = Path(requests(tmp_path, "?"))
    path.write_text(f"{path.read_text()}{line}\n")
    result = batch(str(path))
    assert result.exit_code == 1
    assert told in result.stderr
    assert gateway.asked == []


def test_an_output_is_of_one_run_and_of_nothing_else(
    batch: Run, gateway: FakeGateway, url: str, tmp_path: Path
) -> None:
    path = requests(tmp_path, "hang")
    command = [*COMMAND, "batch", path, "-o", str(tmp_path / "answers.jsonl"), "--gateway", url]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        assert gateway.hangs.wait(30)
        assert "is the output of a run that has not ended" in " ".join(batch(path).stderr.split())
        gateway.goes_on.set()
        assert process.wait(20) == 0
    (tmp_path / "answers.jsonl").write_text(Path(path).read_text())
    assert "line 1 is no row of a batch" in " ".join(batch(path).stderr.split())


def test_the_token_is_sent(batch: Run, gateway: FakeGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRIDSIEVE_TOKEN", "a-token-of-16-characters")
    assert batch(requests(tmp_path, "?")).exit_code == 0
    assert gateway.headers[0]["authorization"] == "Bearer a-token-of-16-characters"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "either REQUESTS or --folder must be given"),
        (("--folder", "."), "--folder needs a --question"),
        (("requests.jsonl", "-q", "?"), "--question is about the clips of a --folder"),
        (("requests.jsonl", "--start"), "--gateway excludes --start and --model"),
    ],
)
def test_flags_that_contradict_one_another_are_refused(batch: Run, arguments: tuple[str, ...], told: str) -> None:
    result = batch(*arguments)
    assert (result.exit_code, told in result.stderr) == (2, True)
