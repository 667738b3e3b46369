"""A request that is cancelled in any stage stops what runs for it, and releases its files, memory and workers."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from framesieve.v1 import prompt_pb2
from services.preprocessing.planner import Planner
from services.preprocessing.workers.process import Fault
from tests.awake import SOON_S, awake
from tests.preprocessing.media_server import fetched_files, forever, head, ok
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
    serving,
    settled,
    stopped,
    video,
)
from tests.preprocessing.worker_jobs import open_memories, open_paths, runs

pytestmark = pytest.mark.asyncio(loop_scope="module")

CLIP = clip(30)


def by_path(path: str) -> Any:
    return prompt_of(prompt_pb2.Part(video=prompt_pb2.Media(path=path)))


async def serves_the_next_request(stub: Any) -> None:
    call = await asked(stub, prompt_of(video(CLIP)))
    assert (await frames_of(call, await plan_of(call)))[0] == [0]


async def test_cancelling_while_a_file_is_hashed_frees_its_thread_within_a_second(
    tiny_checkpoint: Path, tmp_path: Path, queues: Queues
) -> None:
    (tmp_path / "media").mkdir()
    large = tmp_path / "media" / "large.mp4"
    large.touch()
    os.truncate(large, 12 * 2**30)
    async with serving(tiny_checkpoint, tmp_path / "media", tmp_path, queues) as stub:
        for _ in range(2):
            call = stub.Preprocess()
            await call.write(by_path("large.mp4"))
            assert await settled(lambda: large in open_paths())
            call.cancel()
            with awake() as passed_s:
                assert await settled(lambda: large not in open_paths())
                assert passed_s() < SOON_S
        await serves_the_next_request(stub)  # on the only thread


async def test_a_caller_that_disconnects_ends_its_fetches(
    tiny_checkpoint: Path, tmp_path: Path, queues: Queues
) -> None:
    async def drip(writer: asyncio.StreamWriter) -> None:
        writer.write(head(200))
        await forever(writer, b"a", every_s=0.01)

    async with web_server(drip) as server, fetching_from(server, tiny_checkpoint, tmp_path, queues) as stub:
        call = stub.Preprocess()
        await call.write(prompt_of(by_url(server), by_url(server)))
        assert await settled(lambda: server.connections == 2 and fetched_files(tmp_path) == 2)
        call.cancel()
        assert await settled(lambda: all(task.done() for task in server.serving))


async def test_fetched_files_are_closed_once_a_cancelled_plan_ends(
    tiny_checkpoint: Path, tmp_path: Path, queues: Queues, monkeypatch: pytest.MonkeyPatch
) -> None:
    planning, cancelled = threading.Event(), threading.Event()
    plan = Planner.plan

    def late(*arguments: Any) -> Any:
        planning.set()
        cancelled.wait(10)
        return plan(*arguments)

    monkeypatch.setattr(Planner, "plan", late)
    async with web_server(ok(CLIP)) as server, fetching_from(server, tiny_checkpoint, tmp_path, queues) as stub:
        call = stub.Preprocess()
        await call.write(prompt_of(by_url(server)))
        assert await settled(planning.is_set)
        call.cancel()
        await asyncio.sleep(0.1)
        assert fetched_files(tmp_path) == 1
        cancelled.set()
        assert await settled(lambda: fetched_files(tmp_path) == 0)


def requests_running() -> float:
    return REGISTRY.get_sample_value("framesieve_requests_running", {"method": "Preprocess"}) or 0.0


@pytest.mark.parametrize("stage", ["reading", "decoding"])
async def test_cancelling_ends_a_worker_that_hangs_within_a_second(
    tiny_checkpoint: Path, tmp_path: Path, queues: Queues, stage: str
) -> None:
    async with serving(tiny_checkpoint, None, tmp_path, queues) as stub:
        memories = open_memories()
        queue = queues.reading if stage == "reading" else queues.decoding
        with stopped(queue) as pid:
            call = stub.Preprocess()
            await call.write(prompt_of(video(CLIP)))
            if stage == "decoding":
                await plan_of(call)
                await call.write(EVERYTHING)
            assert await settled(lambda: queue.jobs == 1 and requests_running() == 1)
            call.cancel()
            with awake() as passed_s:
                assert await settled(lambda: not runs(pid))
                assert passed_s() < SOON_S
        await serves_the_next_request(stub)  # with the only thread and the new worker
        assert await settled(lambda: queues.counters == (0, 0, 0) and requests_running() == 0)
        assert await settled(lambda: open_memories() <= memories)
        assert queues.replaced == [Fault.ABANDONED]
        queues.replaced.clear()


@pytest.mark.parametrize("stage", ["for a thread", "for a reading worker", "for a decoding worker"])
async def test_a_request_that_is_cancelled_while_it_waits_leaves_its_queue(
    tiny_checkpoint: Path, tmp_path: Path, queues: Queues, stage: str
) -> None:
    threads = 1 if stage == "for a thread" else 2
    async with serving(tiny_checkpoint, None, tmp_path, queues, threads=threads) as stub:
        memories = open_memories()
        queue = queues.decoding if stage == "for a decoding worker" else queues.reading
        with stopped(queue) as pid:
            calls = [stub.Preprocess() for _ in range(2)]
            for number, call in enumerate(calls):
                await call.write(prompt_of(video(CLIP)))
                if queue is queues.decoding:
                    await plan_of(call)
                    await call.write(EVERYTHING)
                jobs = 1 if stage == "for a thread" else 1 + number
                assert await settled(lambda jobs=jobs: queue.jobs == jobs)  # type: ignore[misc]
            await asyncio.sleep(0.1)
            calls[1].cancel()
            assert await settled(lambda: requests_running() == 1 and queue.jobs == 1)
            os.kill(pid, signal.SIGCONT)
            await calls[0].done_writing()
            await read_to_the_end(calls[0])
        assert await settled(lambda: queues.counters == (0, 0, 0) and requests_running() == 0)
        assert await settled(lambda: open_memories() <= memories)
        assert queues.replaced == []
