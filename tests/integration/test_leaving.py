"""Clients that vanish, in each stage: within a second nobody works for them, and all that they held is free."""

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
from tests.integration.fleet import Fleet, at_rest, stopped_workers, until
from tests.integration.halfway import halfway
from tests.integration.load import (
    Asked,
    asked_about,
    dripped,
    dripping,
    endless,
    in_transfer,
    long_clip,
    long_text,
    quick,
    short_clip,
)
from tests.integration.pruning import held_in_pruning


@pytest.fixture
async def client(fleet: Fleet) -> AsyncIterator[FramesieveClient]:
    async with FramesieveClient(fleet.generation.address) as connected:
        yield connected


@asynccontextmanager
async def leaving(fleet: Fleet, *asked: Asked) -> AsyncIterator[None]:
    """Has them leave at the end, none of them having ended by itself."""
    yield
    for each in asked:
        assert not each.task.done()
        await each.leave()
    await at_rest(fleet.first, within_s=SOON_S)


async def test_while_media_is_fetched(fleet: Fleet, client: FramesieveClient) -> None:
    async with dripping(fleet.fetch_port) as server:
        asked = asked_about(client, dripped(fleet.fetch_port))
        async with leaving(fleet, asked):
            await until(lambda: server.requests)
        await until(lambda: all(task.done() for task in server.serving), within_s=SOON_S)


async def test_while_media_is_read(fleet: Fleet, client: FramesieveClient) -> None:
    jobs = partial(fleet.preprocessing[0].metric, "framesieve_preprocessing_jobs", pool="read")
    with stopped_workers(fleet.preprocessing[0]):
        asked = asked_about(client, short_clip(1000))
        async with leaving(fleet, asked):
            await until(lambda: jobs() == 1)


async def test_while_media_is_decoded_and_another_waits_for_the_encoder(fleet: Fleet, client: FramesieveClient) -> None:
    one, other = long_clip(1001), long_clip(1002)
    encoding = asked_about(client, one)
    await until(lambda: encoding.half_encoded)
    waiting = asked_about(client, other)
    async with leaving(fleet, waiting, encoding):
        await until(lambda: fleet.encoder[0].metric("framesieve_encoder_room_waiting") >= 1)
        assert fleet.preprocessing[0].metric("framesieve_preprocessing_jobs", pool="decode") == 1


async def test_while_the_last_slices_are_encoded(fleet: Fleet, client: FramesieveClient) -> None:
    asked = asked_about(client, long_clip(1003))
    encoder, preprocessing = fleet.encoder[0], fleet.preprocessing[0]
    async with leaving(fleet, asked):
        await until(lambda: encoder.metric("framesieve_encoder_queue_slices"))
        await until(lambda: not preprocessing.in_use())
        await until(lambda: encoder.metric("framesieve_encoder_queue_slices"))


async def test_while_an_item_is_pruned(fleet: Fleet, client: FramesieveClient, tmp_path: Path) -> None:
    """The call is over at once, though what prunes is not interrupted: until that is done it holds the item."""
    async with held_in_pruning(fleet, client, tmp_path, seed=14) as held:
        await held.others_go_on()
        async with leaving(fleet, held.asked):
            pass
        await until(lambda: held.encoder.metric("framesieve_requests_total", code="CANCELLED") == 1, within_s=SOON_S)
        held.release()
        await at_rest([held.encoder], within_s=SOON_S)


async def test_while_half_of_an_item_is_transferred(fleet: Fleet, client: FramesieveClient) -> None:
    held = partial(fleet.generation.metric, "framesieve_generation_media_buffer_used_bytes")
    async with halfway(fleet.encoder[1].address, fleet.encoder[0].address) as replica:
        asked = await in_transfer(client, replica, seed=13)
        async with leaving(fleet, asked):
            assert held() > 0
        await until(lambda: not replica.calls, within_s=SOON_S)


async def test_while_a_prompt_is_prefilled(fleet: Fleet, client: FramesieveClient) -> None:
    running = partial(fleet.generation.metric, "framesieve_generation_engine_requests", state="running")
    asked = Asked(client.stream(None, long_text(1004), max_new_tokens=4))
    async with leaving(fleet, asked):
        await until(lambda: running() == 1)
        assert not asked.tokens


async def test_while_tokens_come_and_others_wait_to_run(fleet: Fleet, client: FramesieveClient) -> None:
    asked = [endless(client) for _ in range(5)]
    waiting = partial(fleet.generation.metric, "framesieve_generation_engine_requests", state="waiting")
    async with leaving(fleet, *asked):
        await until(lambda: sum(each.tokens > 0 for each in asked) == 4)
        await until(lambda: waiting() == 1)


@pytest.mark.parametrize("timeout_s", [0.3, 1.2])
async def test_a_deadline_that_passes_is_as_good_as_leaving(
    fleet: Fleet, client: FramesieveClient, timeout_s: float
) -> None:
    asked = Asked(client.stream(long_clip(1005), "What moves?", timeout_s=timeout_s))
    await within(timeout_s + SOON_S, asked.task)
    assert isinstance(asked.failed, DeadlinePassed)
    await at_rest(fleet.first, within_s=SOON_S)


# --- at any moment ------------------------------------------------------------------------------------------------
# Planning and transfer take milliseconds.


async def undisturbed(client: FramesieveClient, first_seed: int) -> tuple[float, float, float]:
    """Seconds from asking to the plan, to the last slice that is encoded, and to the end, when nothing delays them."""
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
    """As `until`, of what this process knows by itself."""
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


def spread(start_s: float, end_s: float, number: int) -> list[float]:
    """The middles of so many parts."""
    return [start_s + (end_s - start_s) * (part + 0.5) / number for part in range(number)]


async def test_at_any_moment(fleet: Fleet, client: FramesieveClient) -> None:
    """While it is planned, and so on, and from the tower's last slice on; some of each are left before the next."""
    planned_s, encoded_s, ended_s = await undisturbed(client, 1100)
    reached: Counter[str] = Counter()
    moments = [(False, after_s) for after_s in (*spread(0, planned_s, 5), *spread(planned_s, encoded_s, 5))]
    moments += [(True, after_s) for after_s in spread(0, ended_s - encoded_s, 5)]
    for number, (encoded, after_s) in enumerate(moments):
        asked = quick(client, 1104 + number)
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


async def test_a_deadline_that_passes_at_any_moment(fleet: Fleet, client: FramesieveClient) -> None:
    planned_s, encoded_s, ended_s = await undisturbed(client, 1200)
    moments = (*spread(0, planned_s, 5), *spread(planned_s, encoded_s, 4), *spread(encoded_s, ended_s, 5))
    passed = 0
    for number, timeout_s in enumerate(moments):
        asked = quick(client, 1204 + number, timeout_s)
        await within(timeout_s + SOON_S, asked.task)
        assert isinstance(asked.failed, DeadlinePassed) or asked.tokens == 2
        passed += asked.failed is not None
        await at_rest(fleet.first, within_s=SOON_S)
    assert passed > 5
