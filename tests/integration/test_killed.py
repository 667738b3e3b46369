"""Services that are killed while they hold requests in every stage: who is told what, what is left, what goes on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from client.client import FramesieveClient
from common.errors import Unavailable
from tests.integration.fleet import Fleet, at_rest, children, runs, until
from tests.integration.load import SOON_S, Load, is_answered_soon, short_clip

FRAMES = ("fetching", "reading", "decoding and encoding", "waiting for room")
MEDIA = (*FRAMES, "in transfer")
TEXT = ("prefilling", "generating")


@pytest.fixture
async def client(fleet: Fleet) -> AsyncIterator[FramesieveClient]:
    async with FramesieveClient(fleet.generation.address) as connected:
        yield connected


@pytest.mark.parametrize(
    ("index", "name", "lost"), [(0, "preprocessing", FRAMES), (1, "encoder", MEDIA), (2, "generation", (*TEXT, *MEDIA))]
)
async def test_whoever_needs_a_killed_service_is_told_its_name_and_nobody_else_notices(
    fleet: Fleet, client: FramesieveClient, index: int, name: str, lost: tuple[str, ...]
) -> None:
    victim = fleet.first[index]
    workers = children(fleet.preprocessing[0].pid)
    async with Load(fleet, client, seed=10 * index) as load:
        await load.held()
        tokens = {stage: asked.tokens for stage, asked in load.asked.items()}
        killed_s = time.monotonic()
        victim.kill()
        if name == "encoder":
            await load.lose_replica()
        for stage in lost:
            asked = load.asked[stage]
            await asyncio.wait_for(asked.task, SOON_S)
            assert isinstance(asked.failed, Unavailable), stage
            assert asked.failed.stage == name
            assert asked.ended_s - killed_s < SOON_S, stage
        load.halfway.release()
        for stage in set(load.asked) - set(lost):
            await until(lambda stage=stage: load.asked[stage].tokens > tokens[stage])  # type: ignore[misc]
            assert load.asked[stage].failed is None
        await load.leave()
        await at_rest((each for each in fleet.first if each is not victim), within_s=SOON_S)
        await until(lambda: not load.halfway.calls and all(task.done() for task in load.server.serving), SOON_S)
    if name == "preprocessing":
        await until(lambda: not any(map(runs, workers)), SOON_S)
    if name == "encoder":
        with pytest.raises(Unavailable, match="encoder"):
            await client.ask(short_clip(10 * index), "What moves?", timeout_s=30)
        assert (await client.ask(None, "Hello?", max_new_tokens=1, timeout_s=30)).usage.completion_tokens == 1

    await asyncio.to_thread(fleet.start, victim)
    await is_answered_soon(client)
    await at_rest(fleet.first, within_s=SOON_S)
