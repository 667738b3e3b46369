"""A request may leave in each stage: it ends what was done for it, and nothing of it is left."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY
from tests.preprocessing.pool_asks import open_memories, open_paths, runs

from framesieve.v1 import prompt_pb2
from services.preprocessing.planner import Planner
from services.preprocessing.workers.process import Fault
from tests.awake import SOON_S, awake
from tests.preprocessing.media_server import fetched_files, head, ok
from tests.preprocessing.media_server import serving as web_server
from tests.preprocessing.preprocessing_media import clip
from tests.preprocessing.service import (
    EVERYTHING,
    Queues,
    asked,
    by_url,
    fetching_from,
    frames_of,
    plan_of,
    prompt_of,
    read_to_the_end,
    running_queues,
    serving,
    settled,
    stopped,
    video,
)

# One event loop for all, to which the workers belong: starting them takes longer than most tests.
pytestmark = pytest.mark.asyncio(loop_scope="module")

CLIP = clip(30)


async def test_cancelling_after_the_plan_decodes_nothing(stub: Any, decoded: list[int]) -> None:
    for _ in range(5):
        call = stub.Preprocess()
        await call.write(prompt_of(video(clip(60))))
        await plan_of(call)
        call.cancel()
    await asyncio.sleep(0.2)
    assert decoded == []


async def test_a_request_that_leaves_while_it_is_planned_leaves_no_file_open(stub: Any, tmp_path: Path) -> None:
    (tmp_path / "media" / "clip.mp4").write_bytes(clip(30))
    for _ in range(5):
        call = stub.Preprocess()
        await call.write(prompt_of(prompt_pb2.Part(video=prompt_pb2.Media(path="clip.mp4"))))
        call.cancel()
    await asyncio.sleep(0.3)
    assert await settled(lambda: tmp_path / "media" / "clip.mp4" not in open_paths())


async def test_a_request_that_leaves_while_its_file_is_hashed_frees_its_thread_within_a_second(
    tiny_checkpoint: Path, tmp_path: Path, queues: Queues
) -> None:
    (tmp_path / "media").mkdir()
    large = tmp_path / "media" / "large.mp4"
    large.touch()
    os.truncate(large, 12 * 2**30)

    def is_open() -> bool:
        return large in open_paths()

    async with serving(tiny_checkpoint, tmp_path / "media", tmp_path, queues) as stub:
        for _ in range(3):
            call = stub.Preprocess()
            await call.write(prompt_of(prompt_pb2.Part(video=prompt_pb2.Media(path="large.mp4"))))
            assert await settled(is_open)
            call.cancel()
            with awake() as passed_s:
                assert await settled(lambda: not is_open())
                assert passed_s() < SOON_S
        # The only thread is there for the next.
        again = await asked(stub, prompt_of(video(CLIP)))
        assert (await frames_of(again, await plan_of(again)))[0] == [0]


async def drip(writer: asyncio.StreamWriter) -> None:
    writer.write(head(200))
    while True:
        writer.write(b"a")
        await writer.drain()
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("leaves", ["by cancelling", "by its deadline"])
async def test_a_caller_that_leaves_ends_its_fetches(
    tiny_checkpoint: Path, tmp_path: Path, queues: Queues, leaves: str
) -> None:
    async with web_server(drip) as server, fetching_from(server, tiny_checkpoint, tmp_path, queues) as stub:
        call = stub.Preprocess(timeout=2 if leaves == "by its deadline" else 30)
        await call.write(prompt_of(by_url(server), by_url(server)))
        assert await settled(lambda: server.connections == 2 and fetched_files(tmp_path) == 2)
        if leaves == "by cancelling":
            call.cancel()
        assert await settled(lambda: all(task.done() for task in server.serving))
    assert len(server.serving) == 2


@pytest.mark.parametrize("planned", ["well", "and fails"])
async def test_a_caller_that_leaves_while_it_is_planned_leaves_no_source_open(
    tiny_checkpoint: Path, tmp_path: Path, queues: Queues, monkeypatch: pytest.MonkeyPatch, planned: str
) -> None:
    planning, left = threading.Event(), threading.Event()
    plan = Planner.plan

    def late(*arguments: Any) -> Any:
        planning.set()
        left.wait(10)
        return plan(*arguments)

    monkeypatch.setattr(Planner, "plan", late)
    body = clip(4) if planned == "well" else b"garbage"
    async with web_server(ok(body)) as server, fetching_from(server, tiny_checkpoint, tmp_path, queues) as stub:
        call = stub.Preprocess()
        await call.write(prompt_of(by_url(server)))
        assert await settled(planning.is_set)
        call.cancel()
        await asyncio.sleep(0.1)
        assert fetched_files(tmp_path) == 1
        left.set()
        assert await settled(lambda: fetched_files(tmp_path) == 0)


# --- workers that are at it when a request leaves ---------------------------------------------------------------


def requests_running() -> float:
    return REGISTRY.get_sample_value("framesieve_requests_running", {"method": "Preprocess"}) or 0.0


@pytest.mark.parametrize("stage", ["reading", "decoding"])
async def test_a_request_that_leaves_ends_the_worker_that_is_at_it_within_a_second(
    tiny_checkpoint: Path, tmp_path: Path, stage: str
) -> None:
    async with running_queues() as queues, serving(tiny_checkpoint, None, tmp_path, queues) as stub:
        memories = open_memories()
        at_it = queues.reading if stage == "reading" else queues.decoding
        with stopped(at_it) as pid:
            call = stub.Preprocess()
            await call.write(prompt_of(video(CLIP)))
            if stage == "decoding":
                await plan_of(call)
                await call.write(EVERYTHING)
            assert await settled(lambda: at_it.jobs == 1 and requests_running() == 1)
            call.cancel()
            with awake() as passed_s:
                assert await settled(lambda: not runs(pid))
                assert passed_s() < SOON_S
        # Thread and worker are there for the next, which needs both.
        again = await asked(stub, prompt_of(video(CLIP)))
        assert (await frames_of(again, await plan_of(again)))[0] == [0]
        assert await settled(lambda: queues.counters == (0, 0, 0) and requests_running() == 0)
        assert await settled(lambda: open_memories() <= memories)
        assert queues.replaced == [Fault.ABANDONED]


@pytest.mark.parametrize("stage", ["for a thread", "for a worker that reads", "for a worker that decodes"])
async def test_a_request_that_leaves_while_it_waits_is_forgotten(
    tiny_checkpoint: Path, tmp_path: Path, stage: str
) -> None:
    threads = 1 if stage == "for a thread" else 2
    async with running_queues() as queues, serving(tiny_checkpoint, None, tmp_path, queues, threads=threads) as stub:
        memories = open_memories()
        at_it = queues.decoding if stage == "for a worker that decodes" else queues.reading
        with stopped(at_it) as pid:
            calls = [stub.Preprocess() for _ in range(2)]
            for number, call in enumerate(calls):
                await call.write(prompt_of(video(CLIP)))
                if at_it is queues.decoding:
                    await plan_of(call)
                    await call.write(EVERYTHING)
                jobs = 1 if stage == "for a thread" else 1 + number
                assert await settled(lambda jobs=jobs: at_it.jobs == jobs)  # type: ignore[misc]
            await asyncio.sleep(0.1)
            calls[1].cancel()
            assert await settled(lambda: requests_running() == 1 and at_it.jobs == 1)
            os.kill(pid, signal.SIGCONT)
            await calls[0].done_writing()
            await read_to_the_end(calls[0])
        assert await settled(lambda: queues.counters == (0, 0, 0) and requests_running() == 0)
        assert await settled(lambda: open_memories() <= memories)
        assert queues.replaced == []
