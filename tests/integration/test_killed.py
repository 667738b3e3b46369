"""Services that are killed while they hold requests in every stage: who is told what, what is left, what goes on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from client.client import FramesieveClient
from common.errors import Unavailable
from tests.integration.fleet import Fleet, at_rest, until
from tests.integration.load import SOON_S, Load, asked_about, short_clip

MEDIA = ("decoding and encoding", "waiting for room")
TEXT = ("prefilling", "generating")


@pytest.fixture
async def client(fleet: Fleet) -> AsyncIterator[FramesieveClient]:
    async with FramesieveClient(fleet.generation.address) as connected:
        yield connected


@pytest.mark.parametrize(
    ("index", "name", "lost"), [(0, "preprocessing", MEDIA), (1, "encoder", MEDIA), (2, "generation", (*TEXT, *MEDIA))]
)
async def test_whoever_needs_a_killed_service_is_told_its_name_and_nobody_else_notices(
    fleet: Fleet, client: FramesieveClient, index: int, name: str, lost: tuple[str, ...]
) -> None:
    load = Load(fleet, client, seed=10 * index)
    await load.held()
    victim = fleet.first[index]
    tokens = {stage: asked.tokens for stage, asked in load.asked.items()}
    killed_s = time.monotonic()
    victim.kill()
    for stage in lost:
        asked = load.asked[stage]
        await asyncio.wait_for(asked.task, SOON_S)
        assert isinstance(asked.failed, Unavailable), stage
        assert asked.failed.stage == name
        assert asked.ended_s - killed_s < SOON_S
    for stage in set(load.asked) - set(lost):
        await until(lambda stage=stage: load.asked[stage].tokens > tokens[stage])  # type: ignore[misc]
        assert load.asked[stage].failed is None
    await load.leave()
    await at_rest((each for each in fleet.first if each is not victim), within_s=SOON_S)

    victim.start()
    await asyncio.to_thread(victim.ready)
    await is_answered_soon(client, index)
    await at_rest(fleet.first, within_s=SOON_S)


async def is_answered_soon(client: FramesieveClient, number: int) -> None:
    """Channels notice within a second that somebody is there again."""
    for attempt in range(6):
        again = asked_about(client, short_clip(100 + 10 * number + attempt))
        await asyncio.wait_for(again.task, 30)
        if again.failed is None:
            assert again.tokens == 4
            return
        await asyncio.sleep(SOON_S / 6)
    raise AssertionError(again.failed)
