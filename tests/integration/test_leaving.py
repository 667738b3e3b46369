"""Clients that disconnect in each stage: within a second all services stop their work and free what they held."""

from __future__ import annotations

from gridsieve.client.client import GridsieveClient
from gridsieve.common.contract.errors import DeadlinePassed
from tests.awake import SOON_S, within
from tests.integration.fleet import Fleet, at_rest, until
from tests.integration.load import Asked, long_clip, one_in_each_stage


async def test_callers_that_disconnect_in_every_stage_free_everything(
    fleet: Fleet, fleet_client: GridsieveClient
) -> None:
    async with one_in_each_stage(fleet, fleet_client, seed=40) as load:
        assert fleet.generation.metric("gridsieve_generation_media_buffer_used_bytes") > 0
        await load.leave()
        await at_rest(fleet.first, within_s=SOON_S)
        await until(lambda: not load.halfway.calls and all(task.done() for task in load.server.serving), SOON_S)
        assert not [each.name for each in fleet.first if each.metric("gridsieve_requests_total", code="INTERNAL")]


async def test_a_deadline_that_passes_while_media_is_encoded_frees_everything(
    fleet: Fleet, fleet_client: GridsieveClient
) -> None:
    asked = Asked(fleet_client.stream(long_clip(1005), "What moves?", timeout_s=1.2))
    await within(1.2 + SOON_S, asked.task)
    assert isinstance(asked.failed, DeadlinePassed)
    await at_rest(fleet.first, within_s=SOON_S)
