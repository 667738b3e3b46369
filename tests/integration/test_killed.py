"""Services that are killed, and callers that leave, while requests are in every stage.

Callers are told which service failed. Requests that do not need it go on, and nothing stays reserved for the others.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gridsieve.client.client import GridsieveClient
from gridsieve.common.contract.errors import Unavailable
from tests import media
from tests.awake import SOON_S, within
from tests.integration.fleet import Fleet, at_rest, until
from tests.integration.gateway import data_url, gateway, image, question
from tests.integration.load import Asked, is_answered_soon, one_in_each_stage, short_clip
from tests.processes import children, runs

FRAMES = ("fetching", "reading", "decoding and encoding", "waiting for room")
MEDIA = (*FRAMES, "in transfer")
TEXT = ("prefilling", "generating")


async def fails_soon(name: str, *asked: Asked) -> None:
    await within(SOON_S, asyncio.wait([each.task for each in asked]))
    for each in asked:
        assert isinstance(each.failed, Unavailable)
        assert each.failed.stage == name


@pytest.mark.parametrize(
    ("index", "name", "lost"),
    [
        pytest.param(0, "preprocessing", FRAMES, marks=pytest.mark.deep),
        pytest.param(1, "encoder", MEDIA, marks=pytest.mark.deep),
        pytest.param(2, "generation", (*TEXT, *MEDIA), marks=pytest.mark.deep),
    ],
)
async def test_only_requests_that_need_a_killed_service_fail_and_name_it(
    fleet: Fleet, fleet_client: GridsieveClient, index: int, name: str, lost: tuple[str, ...]
) -> None:
    client, victim = fleet_client, fleet.first[index]
    workers = children(fleet.preprocessing[0].pid)
    async with one_in_each_stage(fleet, client, seed=10 * index) as load:
        tokens = {stage: asked.tokens for stage, asked in load.asked.items()}
        victim.kill()
        if name == "encoder":
            await load.lose_replica()
        await fails_soon(name, *(load.asked[stage] for stage in lost))
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


async def test_a_gateway_is_healthy_while_questions_about_media_can_be_answered(fleet: Fleet, tmp_path: Path) -> None:
    encoder, generation = fleet.encoder[0], fleet.generation
    fleet.encoder[1].close()
    with gateway(generation.address, tmp_path) as door, door.http() as http:

        def told() -> int:
            return http.get("/health").status_code

        await until(lambda: told() == 200)
        encoder.kill()
        await until(lambda: told() == 503)
        assert generation.serving()  # it is neither restarted nor left by its callers
        text = await asyncio.to_thread(http.post, "/v1/chat/completions", json=question("Hello?", max_tokens=1))
        assert text.status_code == 200
        await asyncio.to_thread(fleet.start, encoder)
        await until(lambda: told() == 200)
        body = question(image(data_url("image/png", media.picture(56, 56))), "What?", max_tokens=1)
        assert (await asyncio.to_thread(http.post, "/v1/chat/completions", json=body)).status_code == 200


@pytest.mark.deep
async def test_callers_that_disconnect_in_every_stage_free_everything(
    fleet: Fleet, fleet_client: GridsieveClient
) -> None:
    async with one_in_each_stage(fleet, fleet_client, seed=40) as load:
        assert fleet.generation.metric("gridsieve_generation_media_buffer_used_bytes") > 0
        await load.leave()
        await at_rest(fleet.first, within_s=SOON_S)
        await until(lambda: not load.halfway.calls and all(task.done() for task in load.server.serving), SOON_S)
        assert not [each.name for each in fleet.first if each.metric("gridsieve_requests_total", code="INTERNAL")]
