"""A request may leave in each stage: it ends what was done for it, and nothing of it is left."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from framesieve.v1 import prompt_pb2
from services.preprocessing.planner import Planner
from tests.unit.loopback import fetched_files, head, ok
from tests.unit.loopback import serving as web_server
from tests.unit.preprocessing_media import clip
from tests.unit.preprocessing_service import (
    Pools,
    by_url,
    fetching_from,
    plan_of,
    prompt_of,
    settled,
    video,
)

pytest_plugins = ["tests.unit.preprocessing_fixtures"]
# One event loop for all, to which the workers belong: starting them takes longer than most tests.
pytestmark = pytest.mark.asyncio(loop_scope="module")


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
    open_files = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    assert tmp_path / "media" / "clip.mp4" not in open_files


async def drip(writer: asyncio.StreamWriter) -> None:
    writer.write(head(200))
    while True:
        writer.write(b"a")
        await writer.drain()
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("leaves", ["by cancelling", "by its deadline"])
async def test_a_caller_that_leaves_ends_its_fetches(
    tiny_checkpoint: Path, tmp_path: Path, pools: Pools, leaves: str
) -> None:
    async with web_server(drip) as server, fetching_from(server, tiny_checkpoint, tmp_path, pools) as stub:
        call = stub.Preprocess(timeout=0.5 if leaves == "by its deadline" else 30)
        await call.write(prompt_of(by_url(server), by_url(server)))
        assert await settled(lambda: server.connections == 2 and fetched_files(tmp_path) == 2)
        if leaves == "by cancelling":
            call.cancel()
        assert await settled(lambda: all(task.done() for task in server.serving))
    assert len(server.serving) == 2


@pytest.mark.parametrize("planned", ["well", "and fails"])
async def test_a_caller_that_leaves_while_it_is_planned_leaves_no_source_open(
    tiny_checkpoint: Path, tmp_path: Path, pools: Pools, monkeypatch: pytest.MonkeyPatch, planned: str
) -> None:
    planning, left = threading.Event(), threading.Event()
    plan = Planner.plan

    def late(*arguments: Any) -> Any:
        planning.set()
        left.wait(10)
        return plan(*arguments)

    monkeypatch.setattr(Planner, "plan", late)
    body = clip(4) if planned == "well" else b"garbage"
    async with web_server(ok(body)) as server, fetching_from(server, tiny_checkpoint, tmp_path, pools) as stub:
        call = stub.Preprocess()
        await call.write(prompt_of(by_url(server)))
        assert await settled(planning.is_set)
        call.cancel()
        await asyncio.sleep(0.1)
        assert fetched_files(tmp_path) == 1
        left.set()
        assert await settled(lambda: fetched_files(tmp_path) == 0)
