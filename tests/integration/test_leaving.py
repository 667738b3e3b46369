"""Clients that disconnect in each stage: within a second all services stop their work and free what they held."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from common.contract.errors import DeadlinePassed
from framesieve.client.client import FramesieveClient
from tests.awake import SOON_S, within
from tests.integration.fleet import Fleet, at_rest, until
from tests.integration.load import Asked, Load, asked_about, endless, long_clip, quick
from tests.integration.pruning import held_in_pruning


async def test_callers_that_disconnect_in_every_stage_free_everything(
    fleet: Fleet, fleet_client: FramesieveClient
) -> None:
    async with Load(fleet, fleet_client, seed=40) as load:
        await load.held()
        assert fleet.generation.metric("framesieve_generation_media_buffer_used_bytes") > 0
        assert not [stage for stage, asked in load.asked.items() if asked.task.done()]
        await load.leave()
        await at_rest(fleet.first, within_s=SOON_S)
        await until(lambda: not load.halfway.calls and all(task.done() for task in load.server.serving), SOON_S)


async def test_a_deadline_that_passes_while_media_is_encoded_frees_everything(
    fleet: Fleet, fleet_client: FramesieveClient
) -> None:
    asked = Asked(fleet_client.stream(long_clip(1005), "What moves?", timeout_s=1.2))
    await within(1.2 + SOON_S, asked.task)
    assert isinstance(asked.failed, DeadlinePassed)
    await at_rest(fleet.first, within_s=SOON_S)


async def test_callers_that_disconnect_free_their_places_and_those_they_wait_for(
    fleet: Fleet, fleet_client: FramesieveClient
) -> None:
    """More requests than run at once: four generate, the fifth waits."""
    asked = [endless(fleet_client) for _ in range(5)]
    waiting = partial(fleet.generation.metric, "framesieve_generation_engine_requests", state="waiting")
    async with leaving(fleet, *asked):
        await until(lambda: sum(each.tokens > 0 for each in asked) == 4)
        await until(lambda: waiting() == 1)


@asynccontextmanager
async def leaving(fleet: Fleet, *asked: Asked) -> AsyncIterator[None]:
    """Ends these requests on exit; none may have ended by itself."""
    yield
    for each in asked:
        assert not each.task.done()
        await each.leave()
    await at_rest(fleet.first, within_s=SOON_S)


@pytest.mark.deep
async def test_a_caller_that_disconnects_while_the_last_slices_are_encoded_frees_everything(
    fleet: Fleet, fleet_client: FramesieveClient
) -> None:
    asked = asked_about(fleet_client, long_clip(1003))
    encoder, preprocessing = fleet.encoder[0], fleet.preprocessing[0]
    async with leaving(fleet, asked):
        await until(lambda: encoder.metric("framesieve_encoder_queue_slices"))
        await until(lambda: not preprocessing.in_use())
        await until(lambda: encoder.metric("framesieve_encoder_queue_slices"))


@pytest.mark.deep
async def test_a_caller_that_disconnects_while_an_item_is_pruned_ends_the_call_at_once(
    fleet: Fleet, fleet_client: FramesieveClient, tmp_path: Path
) -> None:
    """Pruning itself is not interrupted: the item is held until it is done."""
    async with held_in_pruning(fleet, fleet_client, tmp_path, seed=14) as held:
        await held.others_go_on()
        async with leaving(fleet, held.asked):
            pass
        await until(lambda: held.encoder.metric("framesieve_requests_total", code="CANCELLED") == 1, within_s=SOON_S)
        held.release()
        await at_rest([held.encoder], within_s=SOON_S)


# --- at any moment ------------------------------------------------------------------------------------------------
# Planning and transfer take milliseconds, so requests are ended at many moments of an undisturbed run.


async def undisturbed(client: FramesieveClient, first_seed: int) -> tuple[float, float, float]:
    """Seconds from asking to the plan, to the last encoded slice and to the end: the fastest of three runs."""
    _, *took = [await timed(client, first_seed + number) for number in range(4)]
    return min(took, key=lambda each: each[-1])


async def timed(client: FramesieveClient, seed: int) -> tuple[float, float, float]:
    start_s = time.monotonic()
    asked = quick(client, seed)
    await promptly(lambda: asked.events)
    planned_s = time.monotonic() - start_s
    await promptly(lambda: asked.short_one_encoded)
    encoded_s = time.monotonic() - start_s
    await asked.task
    assert asked.tokens == 2
    return planned_s, encoded_s, asked.ended_s - start_s


async def promptly(condition: Callable[[], object]) -> None:
    """Polls every millisecond until the condition holds, which must not block."""
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


def spread(start_s: float, end_s: float, number: int) -> list[float]:
    """The middles of `number` equal parts of the interval."""
    return [start_s + (end_s - start_s) * (part + 0.5) / number for part in range(number)]


@pytest.mark.deep
async def test_a_caller_that_disconnects_at_any_moment_frees_everything(
    fleet: Fleet, fleet_client: FramesieveClient
) -> None:
    planned_s, encoded_s, ended_s = await undisturbed(fleet_client, 1100)
    reached: Counter[str] = Counter()
    moments = [(False, after_s) for after_s in (*spread(0, planned_s, 5), *spread(planned_s, encoded_s, 5))]
    moments += [(True, after_s) for after_s in spread(0, ended_s - encoded_s, 5)]
    for number, (encoded, after_s) in enumerate(moments):
        asked = quick(fleet_client, 1104 + number)
        if encoded:
            await promptly(lambda asked=asked: asked.short_one_encoded)  # type: ignore[misc]
        await asyncio.sleep(after_s)
        reached["answered" if asked.tokens else "encoded" if asked.short_one_encoded else "planned"] += 1
        if not asked.events:
            reached["asked"] += 1
        await asked.leave()
        await at_rest(fleet.first, within_s=SOON_S)
    assert reached["asked"]
    assert reached["encoded"]


@pytest.mark.deep
async def test_a_deadline_that_passes_at_any_moment_frees_everything(
    fleet: Fleet, fleet_client: FramesieveClient
) -> None:
    planned_s, encoded_s, ended_s = await undisturbed(fleet_client, 1200)
    moments = (*spread(0, planned_s, 5), *spread(planned_s, encoded_s, 4), *spread(encoded_s, ended_s, 5))
    passed = 0
    for number, timeout_s in enumerate(moments):
        asked = quick(fleet_client, 1204 + number, timeout_s)
        await within(timeout_s + SOON_S, asked.task)
        assert isinstance(asked.failed, DeadlinePassed) or asked.tokens == 2
        passed += asked.failed is not None
        await at_rest(fleet.first, within_s=SOON_S)
    assert passed > 5
