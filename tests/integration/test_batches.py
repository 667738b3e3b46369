"""`/v1/batches` as OpenAI's client uses it, and `gridsieve batch`, before real services."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch
from typer.testing import CliRunner

from gridsieve.__main__ import app
from gridsieve.client.client import GridsieveClient
from tests import media
from tests.integration.conftest import another_generation
from tests.integration.fleet import Stack
from tests.integration.gateway import Gateway, data_url, question, video

CHAT = "/v1/chat/completions"
ENDS = ("completed", "failed", "expired", "cancelled")
CLIP = video(data_url("video/mp4", media.clip()))


@pytest.fixture
def client(door: Gateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{door.url}/v1", api_key="a-caller-with-batches-of-its-own") as client:
        yield client


def line(custom_id: str, body: Any, url: str = CHAT) -> bytes:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}).encode() + b"\n"


def begun(client: openai.OpenAI, *lines: bytes, **fields: Any) -> Batch:
    sent = client.files.create(file=("requests.jsonl", b"".join(lines)), purpose="batch")
    asked = {"endpoint": CHAT, "completion_window": "24h"} | fields
    return client.batches.create(input_file_id=sent.id, **asked)


def ended(client: openai.OpenAI, batch: Batch) -> Batch:
    deadline = time.monotonic() + 60
    while (found := client.batches.retrieve(batch.id)).status not in ENDS:
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    return found


def rows(client: openai.OpenAI, file_id: str | None) -> dict[str, Any]:
    assert file_id is not None
    found = map(json.loads, client.files.content(file_id).text.splitlines())
    return {row["custom_id"]: row for row in found}


def test_a_batch_answers_its_lines_and_tells_which_failed(client: openai.OpenAI) -> None:
    body = question(CLIP, "What?", pruning={"rate": 0.5})
    batch = begun(
        client,
        *(line("a", body), line("wrong", question("?", temperature=-1)), b"\n", line("b", question("Hi"))),
        metadata={"of": "a test"},
    )
    assert (batch.object, batch.endpoint, batch.status) == ("batch", CHAT, "validating")
    done = ended(client, batch)
    assert (done.status, done.metadata, done.errors) == ("completed", {"of": "a test"}, None)
    assert done.request_counts
    assert done.request_counts.to_dict() == {"total": 3, "completed": 2, "failed": 1}
    times = (done.created_at, done.in_progress_at or 0, done.finalizing_at or 0, done.completed_at or 0)
    assert list(times) == sorted(times)
    answers, errors = rows(client, done.output_file_id), rows(client, done.error_file_id)
    assert (answers.keys(), errors.keys()) == ({"a", "b"}, {"wrong"})
    model = client.models.list().data[0].id
    told = client.chat.completions.create(
        model=model, messages=body["messages"], temperature=0, max_tokens=8, extra_body={"pruning": {"rate": 0.5}}
    )
    answer = answers["a"]["response"]
    assert answer["status_code"] == 200
    assert answer["body"]["choices"][0]["message"]["content"] == told.choices[0].message.content
    assert answer["body"]["usage"]["gridsieve"]["media"][0]["pruning_rate"] > 0
    assert errors["wrong"]["response"]["status_code"] == 400
    assert errors["wrong"]["response"]["body"]["error"]["param"] == "temperature"
    assert next(each.id for each in client.batches.list(limit=1)) == batch.id
    kept = client.files.retrieve(done.output_file_id or "")
    assert (kept.purpose, kept.filename) == ("batch_output", f"{batch.id}_output.jsonl")


def test_responses_are_asked_in_batches_too(client: openai.OpenAI) -> None:
    body = {"input": "Hi", "temperature": 0, "max_output_tokens": 4}
    done = ended(client, begun(client, line("a", body, "/v1/responses"), endpoint="/v1/responses"))
    assert rows(client, done.output_file_id)["a"]["response"]["body"]["object"] == "response"


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ((line("a", question("?")), b"{"), (2, None, "line 2: the line is not JSON")),
        ((line("a", {}), line("a", {})), (2, "custom_id", "line 2: custom_id 'a' is that of line 1, too")),
        ((line("a", {}, "/v1/responses"),), (1, "url", f"line 1: url must be {CHAT}, got '/v1/responses'")),
        ((), (None, None, "there is no request in the file")),
    ],
)
def test_a_file_with_a_wrong_line_fails_as_a_whole(
    client: openai.OpenAI, lines: tuple[bytes, ...], told: tuple[int | None, str | None, str]
) -> None:
    done = ended(client, begun(client, *lines))
    assert done.status == "failed"
    assert done.errors
    assert done.errors.data
    (error,) = done.errors.data
    assert (error.line, error.param) == told[:2]
    assert (error.message or "").startswith(told[2])
    assert done.output_file_id is None


def test_a_cancelled_batch_keeps_its_rows(client: openai.OpenAI) -> None:
    long = question("Hi", ignore_eos=True, max_tokens=1000)
    batch = begun(client, line("short", question("Hi", max_tokens=1)), *(line(str(each), long) for each in range(99)))
    deadline = time.monotonic() + 60
    while not (counts := client.batches.retrieve(batch.id).request_counts) or not counts.completed:
        assert time.monotonic() < deadline
    assert client.batches.cancel(batch.id).status == "cancelling"
    done = ended(client, batch)
    assert done.status == "cancelled"
    assert "short" in rows(client, done.output_file_id)
    unsent = rows(client, done.error_file_id)
    assert {row["error"]["code"] for row in unsent.values()} == {"batch_cancelled"}
    assert len(unsent) + len(rows(client, done.output_file_id)) == 100
    assert client.batches.cancel(batch.id).status == "cancelled"


def test_a_batch_is_its_callers_alone_and_of_a_file_for_batches(client: openai.OpenAI, door: Gateway) -> None:
    batch = begun(client, line("a", question("Hi", max_tokens=1)))
    with openai.OpenAI(base_url=f"{door.url}/v1", api_key="another-caller-0123456789") as other:
        for call in (other.batches.retrieve, other.batches.cancel):
            with pytest.raises(openai.NotFoundError, match="names no batch of this caller"):
                call(batch.id)
        assert list(other.batches.list()) == []
        with pytest.raises(openai.NotFoundError, match="names no file of this caller"):
            other.files.content(batch.input_file_id)
    clip = client.files.create(file=("a.mp4", media.clip()), purpose="user_data")
    with pytest.raises(openai.BadRequestError, match="input_file_id must be uploaded with the purpose batch"):
        client.batches.create(input_file_id=clip.id, endpoint=CHAT, completion_window="24h")
    ended(client, batch)


async def test_requests_that_yield_are_answered_after_questions(
    stack: Stack, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """Of one place for a running answer."""
    flags = ("--max-num-seqs", "1", "--kv-cache-tokens", "4096")
    order: list[str] = []
    with another_generation(stack, tiny_checkpoint, tmp_path, *flags) as generation:
        async with GridsieveClient(generation.address) as client, asyncio.TaskGroup() as group:

            async def ask(name: str, tokens: int, yields: bool) -> None:
                answer = await client.ask(None, "Hi", max_new_tokens=tokens, ignore_eos=True, yields=yields)
                assert answer.usage.completion_tokens == tokens
                order.append(name)

            first = group.create_task(ask("job", 1500, True))
            await asyncio.sleep(0.5)
            group.create_task(ask("second job", 2, True))
            await asyncio.sleep(0.1)
            assert not first.done()
            group.create_task(ask("question", 8, False))
    assert order == ["question", "job", "second job"]


def test_a_folder_is_asked_through_a_gateway(door: Gateway, tmp_path: Path, media_root: Path) -> None:
    (tmp_path / "broken.mp4").write_bytes(b"no film")
    (tmp_path / "clip.mp4").write_bytes(media.clip())
    (tmp_path / "bell.wav").write_bytes(media.sound(media.chirp(1.0)))
    output = tmp_path / "answers.jsonl"
    table = ("batch", "--folder", str(tmp_path), "-q", "What?", "--max-new-tokens", "4", "--ordered")
    run = CliRunner().invoke(app, [*table, "-o", str(output), "--gateway", door.url, "--json"])
    sums = json.loads(run.stdout)
    assert (run.exit_code, sums["answered"], sums["failed"]) == (1, 1, 1)
    assert sums["skipped"] == ["bell.wav"]  # the model takes no sounds
    assert sums["first_failure"].startswith("broken.mp4: messages[0].content[0].video_url.url")
    broken, clip = map(json.loads, output.read_text().splitlines())
    assert (broken["custom_id"], broken["response"]["status_code"]) == ("broken.mp4", 400)
    assert clip["response"]["body"]["usage"]["completion_tokens"] <= 4
    on_server = ("batch", "--folder", str(media_root), "-q", "What?", "--on-server", "--max-new-tokens", "4")
    assert CliRunner().invoke(app, [*on_server, "-o", str(tmp_path / "a.jsonl"), "--gateway", door.url]).exit_code == 0
