"""Services that are killed while they hold requests in every stage: who is told what, what is left, what goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from common.contract.errors import Unavailable
from framesieve.client.client import FramesieveClient
from tests.awake import SOON_S, within
from tests.integration.fleet import Fleet, at_rest, children, runs, until
from tests.integration.load import Asked, Load, is_answered_soon, short_clip
from tests.integration.pruning import held_in_pruning

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
        victim.kill()
        if name == "encoder":
            await load.lose_replica()
        await within(SOON_S, asyncio.wait([load.asked[stage].task for stage in lost]))
        for stage in lost:
            asked = load.asked[stage]
            assert isinstance(asked.failed, Unavailable), stage
            assert asked.failed.stage == name
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


# --- while an item is pruned --------------------------------------------------------------------------------------


async def is_told(asked: Asked, name: str) -> None:
    await within(SOON_S, asked.task)
    assert isinstance(asked.failed, Unavailable)
    assert asked.failed.stage == name


async def test_preprocessing_is_needed_no_more(fleet: Fleet, client: FramesieveClient, tmp_path: Path) -> None:
    async with held_in_pruning(fleet, client, tmp_path, seed=21) as held:
        fleet.preprocessing[0].kill()
        await asyncio.sleep(SOON_S)
        assert not held.asked.task.done()
        await held.others_go_on()
        held.release()
        await asyncio.wait_for(held.asked.task, 30)
        assert held.asked.tokens == 2
        await at_rest((held.encoder, fleet.generation), within_s=SOON_S)


async def test_another_encoder_does_what_a_killed_one_did(
    fleet: Fleet, client: FramesieveClient, tmp_path: Path
) -> None:
    async with held_in_pruning(fleet, client, tmp_path, seed=22) as held:
        held.encoder.kill()
        await asyncio.wait_for(held.asked.task, 30)
        assert held.asked.tokens == 2
        await held.others_go_on()
        await at_rest(fleet.first, within_s=SOON_S)


async def test_the_last_encoder_is_named(fleet: Fleet, client: FramesieveClient, tmp_path: Path) -> None:
    async with held_in_pruning(fleet, client, tmp_path, seed=23) as held:
        fleet.encoder[0].kill()
        held.encoder.kill()
        await is_told(held.asked, "encoder")
        await held.others_go_on()
        await at_rest((fleet.preprocessing[0], fleet.generation), within_s=SOON_S)


async def test_generation_is_named_and_leaves_nothing(fleet: Fleet, client: FramesieveClient, tmp_path: Path) -> None:
    async with held_in_pruning(fleet, client, tmp_path, seed=24) as held:
        fleet.generation.kill()
        await is_told(held.asked, "generation")
        await is_told(held.beside, "generation")
        await until(lambda: held.encoder.metric("framesieve_requests_total", code="CANCELLED") == 1, within_s=SOON_S)
        held.release()
        await at_rest((fleet.preprocessing[0], fleet.encoder[0], held.encoder), within_s=SOON_S)
