"""A question to the services, greedy, and how long its answer takes by the client's clock."""

from __future__ import annotations

import time
from typing import Unpack

from benchmarks.timing import Timed
from gridsieve.client.answer import Delta, Finished
from gridsieve.client.client import GridsieveClient
from gridsieve.client.prompt import Options, PartLike
from gridsieve.common.contract.retention import EVS


async def ask(
    client: GridsieveClient, media: PartLike, question: str, **options: Unpack[Options]
) -> tuple[Timed, Finished]:
    """The times of an answer, and its last event, which has its usage and stages. A rate without a method is by EVS, as
    in the figures of RESULTS.md."""
    start, first_s = time.perf_counter(), 0.0
    options["temperature"] = 0
    options.setdefault("pruning_method", EVS)
    async for event in client.stream(media, question, **options):
        if isinstance(event, Delta) and not first_s:
            first_s = time.perf_counter() - start
        if isinstance(event, Finished):
            finished = event
    return Timed(first_s, time.perf_counter() - start, finished.usage.completion_tokens), finished
