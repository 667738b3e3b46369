"""Generation as two processes that hold half of the model each: what it answers, and how it ends."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from common.contract.errors import Unavailable
from common.process import ExitStatus
from framesieve.cli.launcher import LocalStack
from framesieve.client.client import FramesieveClient
from framesieve.client.prompt import Video
from tests import media
from tests.integration.fleet import Service, runs, until
from tests.integration.load import endless

# A service whose ranks, once they have met, wait for each other no longer than that.
IMPATIENT = """
from datetime import timedelta
from torch.distributed.distributed_c10d import _set_pg_timeout
from common.serving.server import run
from services.generation.__main__ import main
from services.generation.parallel.group import Group
from services.generation.parallel.group import WorkerRanks
watch = WorkerRanks.watch
WorkerRanks.watch = lambda self, on_lost: (watch(self, on_lost), _set_pg_timeout(timedelta(seconds=6)))
run(main)
"""


@pytest.fixture
def halves(
    stack: LocalStack, adapted: Iterable[Path], checkpoint: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Service]:
    """A generation of two ranks, behind the stack's preprocessing and encoder. Its parameter is its program."""
    upstream = [flag for name in ("preprocessing", "encoder") for flag in (f"--{name}", stack.addresses[name])]
    flags = ("--tensor-parallel", "2", "--threads", "1", "--drain-s", "10", *upstream)
    flags += ("--adapters", ",".join(f"{folder.name}={folder}" for folder in adapted))
    service = Service("generation", checkpoint, tmp_path, flags, program=getattr(request, "param", None))
    service.start()
    try:
        service.ready()
        yield service
    finally:
        service.close()


def other_rank(service: Service) -> int:
    found = re.search(r'"others": \[(\d+)\]', service.log())
    assert found, service.log()
    return int(found[1])


async def test_two_ranks_answer_what_one_does_and_end_together(
    stack: LocalStack, adapted: Iterable[Path], halves: Service
) -> None:
    clips = [media.clip(16, fps=4, seed=seed) for seed in (50, 51)]
    rates, adapters = (0.0, 0.75, 0.5), (None, *(folder.name for folder in adapted))

    async def answers(address: str) -> list[tuple[int, ...]]:
        async with FramesieveClient(address) as client:
            asked = [
                client.ask(
                    Video(data=clip),
                    "What moves?",
                    pruning_rate=rate,
                    max_new_tokens=12,
                    ignore_eos=True,
                    adapter=adapter,
                )
                for clip in clips
                for rate, adapter in zip(rates, adapters, strict=True)
            ]
            return [answer.token_ids for answer in await asyncio.gather(*asked)]

    assert await answers(halves.address) == await answers(stack.address)
    rank = other_rank(halves)
    assert runs(rank)
    halves.tell(signal.SIGTERM)
    assert await asyncio.to_thread(halves.ended) == ExitStatus.FINISHED
    assert not runs(rank)


async def test_a_rank_that_dies_takes_the_service_down(halves: Service) -> None:
    async with FramesieveClient(halves.address) as client:
        asked = endless(client)
        await until(lambda: asked.tokens)
        os.kill(other_rank(halves), signal.SIGKILL)
        await asyncio.wait_for(asked.task, 60)
        assert isinstance(asked.failed, Unavailable)
        assert asked.failed.stage == "generation"
    assert await asyncio.to_thread(halves.ended) == ExitStatus.FAILED
    assert "rank 1 of 2 was ended by signal 9" in halves.log()
    assert "by a bug" not in halves.log()


@pytest.mark.parametrize("halves", [IMPATIENT], indirect=True)
async def test_a_rank_that_stands_still_takes_the_service_down(halves: Service) -> None:
    async with FramesieveClient(halves.address) as client:
        asked = endless(client)
        await until(lambda: asked.tokens)
        rank = other_rank(halves)
        os.kill(rank, signal.SIGSTOP)
        await asyncio.wait_for(asked.task, 60)
        assert isinstance(asked.failed, Unavailable)
        assert asked.failed.stage == "generation"
    assert await asyncio.to_thread(halves.ended) == ExitStatus.FAILED
    assert "the engine ended: ranks are out of step" in halves.log()
    await until(lambda: not runs(rank))
