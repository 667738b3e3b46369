"""Clients that disconnect in each stage: within a second all services stop their work and free what they held."""

from __future__ import annotations

from pathlib import Path

import pytest

from gridsieve.client.client import GridsieveClient
from gridsieve.common.contract.errors import DeadlinePassed
from tests.awake import SOON_S, within
from tests.integration.fleet import Fleet, at_rest, until
from tests.integration.load import Asked, long_clip, one_in_each_stage
from tests.integration.pruning import held_in_pruning


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


@pytest.mark.deep
async def test_a_caller_that_disconnects_while_an_item_is_pruned_ends_the_call_at_once(
    fleet: Fleet, fleet_client: GridsieveClient, tmp_path: Path
) -> None:
    """Pruning itself is not interrupted: the item is held until it is done."""
    async with held_in_pruning(fleet, fleet_client, tmp_path, seed=14) as held:
        await held.others_go_on()
        assert not held.asked.task.done()
        await held.asked.leave()
        await at_rest(fleet.first, within_s=SOON_S)
        await until(lambda: held.encoder.metric("gridsieve_requests_total", code="CANCELLED") == 1, within_s=SOON_S)
        held.release()
        await at_rest([held.encoder], within_s=SOON_S)
