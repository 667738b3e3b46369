"""Two encoders and two preprocessors behind one generation: load spreads, one of each dies, and nothing is lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import count

from common.contract.errors import FramesieveError
from framesieve.client.client import FramesieveClient
from tests.awake import SOON_S
from tests.integration.fleet import Fleet, Service, at_rest, until
from tests.integration.load import short_clip

AT_ONCE = 4


async def test_a_replica_that_dies_under_load_costs_nobody_an_answer(fleet: Fleet) -> None:
    for each in fleet.second:
        each.start()
    for each in fleet.second:
        await asyncio.to_thread(each.ready)
    outcomes: Counter[str] = Counter()
    both_killed = False
    numbers = count()

    async def client_of_its_own() -> None:
        async with FramesieveClient(fleet.generation.address) as client:
            while not both_killed:
                number = next(numbers)
                try:
                    answer = await client.ask(
                        [short_clip(2000 + 2 * number), short_clip(2001 + 2 * number)],
                        "What moves?",
                        pruning_rate=0.5,
                        max_new_tokens=3,
                        ignore_eos=True,
                        timeout_s=60,
                    )
                except FramesieveError as error:
                    outcomes[repr(error)] += 1
                else:
                    assert answer.usage.completion_tokens == 3
                    outcomes["answered"] += 1

    clients = [asyncio.create_task(client_of_its_own()) for _ in range(AT_ONCE)]
    for replicas, holds in ((fleet.encoder, "encoder_queue_slices"), (fleet.preprocessing, "requests_running")):
        await until(lambda replicas=replicas: all(map(worked, replicas)))  # type: ignore[misc]
        await until(lambda last=replicas[1], holds=holds: f"framesieve_{holds}" in last.in_use())  # type: ignore[misc]
        replicas[1].kill()
        before = outcomes.total()
        await until(lambda before=before: outcomes.total() >= before + AT_ONCE)  # type: ignore[misc]
    both_killed = True
    await asyncio.gather(*clients)
    assert outcomes == {"answered": outcomes.total()}
    await at_rest(fleet.first, within_s=SOON_S)


def worked(replica: Service) -> bool:
    return replica.metric("framesieve_requests_total", code="OK") > 0
