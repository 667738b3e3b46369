"""A worker of Ray's jobs, without Ray, against a hand-written generation service. integration/test_ray.py has both."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import grpc
import pytest

pytest.importorskip("ray")

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from gridsieve.cli.launcher import LocalStack
from gridsieve.common.contract.errors import GridsieveError, InvalidRequest, MediaDamaged, Overloaded, Unauthenticated
from gridsieve.ray import worker
from gridsieve.ray.job import task_of, without, written
from gridsieve.ray.worker import Worker
from gridsieve.v1 import generation_pb2_grpc
from tests.common.loopback import serving
from tests.gridsieve.fake_services import FakeServices
from tests.gridsieve.stack import events


class Ended(Exception):
    """In place of the end of this process."""


class Generation(generation_pb2_grpc.GenerationServiceServicer):
    """Raises each of `failures` once, then answers as `FakeServices`. knows: whether it takes the caller's token.

    together: requests are answered in groups of so many.
    """

    def __init__(self) -> None:
        self.fake = FakeServices()
        self.failures: list[GridsieveError] = []
        self.knows = True
        self.together = asyncio.Barrier(1)
        self.running = self.most_running = 0

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        if not self.knows:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no token")
        if self.failures:
            raise self.failures.pop()
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await self.together.wait()
        async for each in self.fake.Generate(request, context):
            yield each
        self.running -= 1


@pytest.fixture
async def services(tmp_path: Path) -> AsyncIterator[Generation]:
    made = Generation()
    async with serving(f"unix:{tmp_path}/generation.sock", made):
        yield made


async def rows(tmp_path: Path, clips: dict[str, list[Any]], question: str | None = "What moves?", **asking: Any) -> Any:
    """What a worker makes of rows, given as columns."""
    asked = Worker(task_of(question, {"services": f"unix:{tmp_path}/generation.sock", **asking}))
    try:
        return (await asked(pa.table(clips))).to_pylist()
    finally:
        if asked._client:
            await asked._client.close()


async def test_a_row_has_the_answer_its_tokens_and_what_was_kept_of_the_clip(services: Generation, clip: str) -> None:
    options = {"pruning_rate": 0.5, "frames": {"mode": "keyframes"}, "json_schema": {"type": "object"}}
    (row,) = await rows(Path(clip).parent, {"uri": [f"file://{clip}"], "label": [7]}, **options)
    assert row == {
        "uri": f"file://{clip}",
        "label": 7,
        "question": "What moves?",
        "answer": "A red ball ⚽",
        "finish_reason": "stop",
        "prompt_tokens_full": 12,
        "prompt_tokens": 8,
        "completion_tokens": 2,
        "media_tokens": 8,
        "kept_tokens": 4,
        "error": None,
        "message": None,
    }
    (asked,) = services.fake.asked
    video = asked.prompt.messages[-1].parts[0].video
    assert (video.data, video.frame_sampling.mode) == (b"film", "keyframes")
    assert (asked.pruning.rate, asked.sampling.json_schema) == (0.5, '{"type": "object"}')


async def test_what_is_wrong_with_one_clip_is_in_its_row_and_types_do_not_depend_on_rows(
    services: Generation, clip: str
) -> None:
    large = Path(clip).with_name("large.mp4")
    large.write_bytes(bytes(9))
    uris = [clip, f"{clip}.missing", str(large), "nowhere://clip.mp4", clip]
    questions = [None, None, None, None, "refuse"]
    found = await rows(large.parent, {"uri": uris, "question": questions}, max_inline_bytes=8)
    assert [each["error"] for each in found] == [None, *["MEDIA_REJECTED"] * 3, MediaDamaged.reason]
    assert [each["answer"] is None for each in found] == [False, *[True] * 4]
    assert "FileNotFoundError" in found[1]["message"]
    assert "9 bytes, at most 8" in found[2]["message"]
    assert found[4]["question"] == "refuse"
    made = Worker(task_of("What moves?", {"services": "unix:/nowhere"}))
    assert (await made(pa.table({"uri": [f"{clip}.missing"]}))).schema.types == [pa.string()] * 4 + [
        *[pa.int64()] * 5,
        *[pa.string()] * 2,
    ]


async def test_services_read_paths_below_their_root_and_urls(services: Generation, tmp_path: Path) -> None:
    uris = ["cats/1.mp4", "https://cats.org/1.mp4", "s3://cats/1.mp4"]
    *read, refused = await rows(tmp_path, {"uri": uris}, read_by="service")
    assert [each["error"] for each in read] == [None, None]
    media = [asked.prompt.messages[-1].parts[0].video for asked in services.fake.asked]
    assert {(each.path, each.url) for each in media} == {("cats/1.mp4", ""), ("", "https://cats.org/1.mp4")}
    assert "s3" in refused["message"]


async def test_a_worker_has_many_requests_in_flight_but_no_more_than_it_may(services: Generation, clip: str) -> None:
    services.together = asyncio.Barrier(3)
    found = await rows(Path(clip).parent, {"uri": [clip] * 12}, in_flight=3)
    assert len(found) == len(services.fake.asked) == 12
    assert services.most_running == 3


async def test_full_services_are_asked_again(services: Generation, clip: str) -> None:
    services.failures = [Overloaded("full", retry_after_s=0.01)] * 2
    (row,) = await rows(Path(clip).parent, {"uri": [clip]})
    assert row["answer"]


@pytest.mark.parametrize("failure", ["token", "gone", "no question"])
async def test_what_would_fail_each_row_fails_the_job(services: Generation, clip: str, failure: str) -> None:
    asking: dict[str, Any] = {}
    if failure == "token":
        services.knows = False
    if failure == "gone":
        asking["services"] = f"unix:{clip}.sock"
    raised = {"token": Unauthenticated, "gone": ConnectionError, "no question": InvalidRequest}[failure]
    with patch.object(worker, "PATIENCE_S", 0.1), patch.object(worker, "RETRY_S", 0.1), pytest.raises(raised):
        await rows(Path(clip).parent, {"uri": [clip]}, None if failure == "no question" else "What moves?", **asking)


@pytest.mark.parametrize(("asking", "raised"), [({"fps": 2}, TypeError), ({"max_new_tokens": 2**40}, InvalidRequest)])
def test_options_that_no_request_can_have_are_refused_before_the_job(asking: dict[str, Any], raised: Any) -> None:
    with pytest.raises(raised, match=next(iter(asking))):
        task_of("What moves?", asking)


def test_a_job_that_begins_again_asks_what_is_not_written_and_removes_files_without_an_end(tmp_path: Path) -> None:
    rows = pa.table({"uri": ["a", "b"], "question": ["What moves?", "When?"], "answer": ["x", None]})
    pq.write_table(rows, tmp_path / "1.parquet")
    (tmp_path / "2.parquet").write_bytes((tmp_path / "1.parquet").read_bytes()[:-9])
    done = written(fsspec.filesystem("file"), str(tmp_path))
    assert done == {("a", "What moves?"), ("b", "When?")}
    assert [each.name for each in tmp_path.iterdir()] == ["1.parquet"]
    assert not written(fsspec.filesystem("file"), str(tmp_path / "nowhere"))
    clips = pa.table({"uri": ["a", "a", "b", "c"], "question": ["When?", None, None, None]})
    assert without(clips, done, "What moves?")["uri"].to_pylist() == ["a", "b", "c"]
    assert without(clips.select(["uri"]), done, "When?")["uri"].to_pylist() == ["a", "a", "c"]


async def test_a_worker_whose_stack_loses_a_service_ends_so_that_ray_starts_both_again(record: Path, clip: str) -> None:
    made = Worker(task_of("What moves?", {"services": LocalStack()}))
    assert {event for _, event in events(record)} == {"started", "serving"}
    stack = made._stack
    assert stack
    processes = list(stack.processes.values())
    os.kill(processes[-1].pid, signal.SIGKILL)
    with patch("os._exit", side_effect=Ended) as ended, pytest.raises(Ended):
        await asyncio.wait_for(made(pa.table({"uri": [clip]})), 30)
    ended.assert_called_with(1)
    assert all(each.poll() is not None for each in processes)
