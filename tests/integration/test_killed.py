"""Services that are killed while they hold requests in every stage: callers are told which service failed.

Requests that do not need the killed service go on, and nothing stays reserved for the others.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import count
from pathlib import Path

import pytest

from common.contract.errors import FramesieveError, Unavailable
from framesieve.client.client import FramesieveClient
from tests.awake import SOON_S, within
from tests.integration.fleet import Fleet, Service, at_rest, children, runs, until
from tests.integration.load import Asked, Load, is_answered_soon, short_clip
from tests.integration.pruning import held_in_pruning

FRAMES = ("fetching", "reading", "decoding and encoding", "waiting for room")
MEDIA = (*FRAMES, "in transfer")
TEXT = ("prefilling", "generating")


@pytest.mark.parametrize(
    ("index", "name", "lost"), [(0, "preprocessing", FRAMES), (1, "encoder", MEDIA), (2, "generation", (*TEXT, *MEDIA))]
)
async def test_only_requests_that_need_a_killed_service_fail_and_name_it(
    fleet: Fleet, fleet_client: FramesieveClient, index: int, name: str, lost: tuple[str, ...]
) -> None:
    client, victim = fleet_client, fleet.first[index]
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


# --- replicas -----------------------------------------------------------------------------------------------------


@pytest.mark.deep
async def test_no_request_fails_when_a_replica_is_killed_under_load(fleet: Fleet) -> None:
    await asyncio.to_thread(fleet.start, *fleet.second)
    outcomes: Counter[str] = Counter()
    both_killed = False
    numbers = count()

    async def ask_until_both_are_killed() -> None:
        async with FramesieveClient(fleet.generation.address) as client:
            while not both_killed:
                number = next(numbers)
                clips = [short_clip(2000 + 2 * number), short_clip(2001 + 2 * number)]
                try:
                    answer = await client.ask(
                        clips, "What moves?", pruning_rate=0.5, max_new_tokens=3, ignore_eos=True, timeout_s=60
                    )
                except FramesieveError as error:
                    outcomes[repr(error)] += 1
                else:
                    assert answer.usage.completion_tokens == 3
                    outcomes["answered"] += 1

    clients = [asyncio.create_task(ask_until_both_are_killed()) for _ in range(4)]
    for replicas, holds in ((fleet.encoder, "encoder_queue_slices"), (fleet.preprocessing, "requests_running")):
        await until(lambda replicas=replicas: all(map(has_answered, replicas)))  # type: ignore[misc]
        await until(lambda last=replicas[1], holds=holds: f"framesieve_{holds}" in last.in_use())  # type: ignore[misc]
        replicas[1].kill()
        before = outcomes.total()
        await until(lambda before=before: outcomes.total() >= before + len(clients))  # type: ignore[misc]
    both_killed = True
    await asyncio.gather(*clients)
    assert outcomes == {"answered": outcomes.total()}
    await at_rest(fleet.first, within_s=SOON_S)


def has_answered(replica: Service) -> bool:
    return replica.metric("framesieve_requests_total", code="OK") > 0


# --- while an item is pruned --------------------------------------------------------------------------------------


async def fails_soon(asked: Asked, name: str) -> None:
    await within(SOON_S, asked.task)
    assert isinstance(asked.failed, Unavailable)
    assert asked.failed.stage == name


@pytest.mark.deep
async def test_an_item_that_is_being_pruned_does_not_need_preprocessing(
    fleet: Fleet, fleet_client: FramesieveClient, tmp_path: Path
) -> None:
    async with held_in_pruning(fleet, fleet_client, tmp_path, seed=21) as held:
        fleet.preprocessing[0].kill()
        await asyncio.sleep(SOON_S)
        assert not held.asked.task.done()
        await held.others_go_on()
        held.release()
        await asyncio.wait_for(held.asked.task, 30)
        assert held.asked.tokens == 2
        await at_rest((held.encoder, fleet.generation), within_s=SOON_S)


@pytest.mark.deep
async def test_another_encoder_repeats_the_work_of_one_killed_while_it_prunes(
    fleet: Fleet, fleet_client: FramesieveClient, tmp_path: Path
) -> None:
    async with held_in_pruning(fleet, fleet_client, tmp_path, seed=22) as held:
        held.encoder.kill()
        await asyncio.wait_for(held.asked.task, 30)
        assert held.asked.tokens == 2
        await held.others_go_on()
        await at_rest(fleet.first, within_s=SOON_S)


@pytest.mark.deep
async def test_a_caller_learns_that_the_last_encoder_is_gone(
    fleet: Fleet, fleet_client: FramesieveClient, tmp_path: Path
) -> None:
    async with held_in_pruning(fleet, fleet_client, tmp_path, seed=23) as held:
        fleet.encoder[0].kill()
        held.encoder.kill()
        await fails_soon(held.asked, "encoder")
        await held.others_go_on()
        await at_rest((fleet.preprocessing[0], fleet.generation), within_s=SOON_S)


@pytest.mark.deep
async def test_an_encoder_that_prunes_frees_the_item_once_generation_is_killed(
    fleet: Fleet, fleet_client: FramesieveClient, tmp_path: Path
) -> None:
    async with held_in_pruning(fleet, fleet_client, tmp_path, seed=24) as held:
        fleet.generation.kill()
        await fails_soon(held.asked, "generation")
        await fails_soon(held.beside, "generation")
        await until(lambda: held.encoder.metric("framesieve_requests_total", code="CANCELLED") == 1, within_s=SOON_S)
        held.release()
        await at_rest((fleet.preprocessing[0], fleet.encoder[0], held.encoder), within_s=SOON_S)
