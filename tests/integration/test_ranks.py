"""Generation, or an encoder, as two processes: they answer as one process does, and end when one of them ends."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gridsieve.client.client import GridsieveClient
from gridsieve.client.encoding import encode
from gridsieve.client.prompt import Image, Video
from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import Unavailable
from gridsieve.common.process import ExitStatus
from tests import media
from tests.drafts import SPECFORGE, write_head
from tests.integration.conftest import upstream_of
from tests.integration.fleet import Service, Stack, started, until
from tests.integration.load import endless
from tests.processes import children, runs

# Runs generation with a timeout of 6 s for each step of its ranks.
IMPATIENT = """
from datetime import timedelta
from torch.distributed.distributed_c10d import _set_pg_timeout
from gridsieve.common.serving.server import run
from gridsieve.services.generation.__main__ import main
from gridsieve.services.compute.rank_failure import RankFailure
watch = RankFailure.watch
RankFailure.watch = lambda self, on_failure: (watch(self, on_failure), _set_pg_timeout(timedelta(seconds=6)))
run(main)
"""

Start = Callable[..., Service]


@pytest.fixture
def start(stack: Stack, adapted: Iterable[Path], tiny_checkpoint: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts generation with two ranks behind the preprocessing and encoder of the stack, and a head that drafts."""
    sizes = Checkpoint(tiny_checkpoint).config["text_config"]
    head = write_head(tmp_path / "head", SPECFORGE, sizes["hidden_size"], sizes["vocab_size"])
    flags = ("--tensor-parallel", "2", "--threads", "1", "--drain-s", "10", *upstream_of(stack))
    flags += ("--draft-model", str(head))
    flags += ("--adapters", ",".join(f"{folder.name}={folder}" for folder in adapted))
    ranked: list[Service] = []

    def one(program: str | None = None) -> Service:
        service = Service("generation", tiny_checkpoint, tmp_path, flags, program=program)
        ranked.append(service)
        service.start()
        service.ready()
        return service

    yield one
    for each in ranked:
        each.close()


def rank_1(service: Service) -> int:
    """The process id of the other rank."""
    found = re.search(r'"others": \[(\d+)\]', service.log())
    assert found, service.log()
    return int(found[1])


async def fails_a_running_request(service: Service, number: signal.Signals) -> None:
    """Sends the signal to rank 1 while a request runs."""
    async with GridsieveClient(service.address) as client:
        asked = endless(client)
        await until(lambda: asked.tokens)
        os.kill(rank_1(service), number)
        await asyncio.wait_for(asked.task, 60)
    assert isinstance(asked.failed, Unavailable)
    assert asked.failed.stage == "generation"
    assert await asyncio.to_thread(service.ended) == ExitStatus.FAILED


@pytest.mark.deep
async def test_two_ranks_of_generation_answer_as_one_and_end_when_one_is_killed(
    stack: Stack, adapted: Iterable[Path], start: Start
) -> None:
    clips = [media.clip(16, fps=4, seed=seed) for seed in (50, 51)]
    variants = zip((0.0, 0.75, 0.5, 0.25), (None, *(folder.name for folder in adapted)), strict=True)
    options: list[dict[str, Any]] = [{"pruning_rate": rate, "adapter": adapter} for rate, adapter in variants]

    async def answers(address: str) -> list[tuple[int, ...]]:
        async with GridsieveClient(address) as client:
            asked = [
                client.ask(Video(data=clip), "What moves?", max_new_tokens=12, ignore_eos=True, **each)
                for clip in clips
                for each in options
            ]
            return [answer.token_ids for answer in await asyncio.gather(*asked)]

    service = start()
    assert await answers(service.address) == await answers(stack.address)
    assert service.metric("gridsieve_generation_draft_tokens_total")
    await fails_a_running_request(service, signal.SIGKILL)
    assert "rank 1 of 2 was ended by signal 9" in service.log()
    assert "a bug ended" not in service.log()


@pytest.mark.deep
async def test_a_rank_of_generation_that_hangs_ends_the_service(start: Start) -> None:
    service = start(IMPATIENT)
    await fails_a_running_request(service, signal.SIGSTOP)
    assert "the engine ended: ranks are out of step" in service.log()
    await until(lambda: not runs(rank_1(service)))


@pytest.mark.deep
@pytest.mark.parametrize(("flag", "rounding"), [("--data-parallel", 1e-5), ("--tower-tensor-parallel", 2e-4)])
async def test_two_ranks_of_the_encoder_encode_as_one_and_end_when_one_is_killed(
    stack: Stack, tiny_checkpoint: Path, tmp_path: Path, flag: str, rounding: float
) -> None:
    """rounding: of values that the ranks of a divided tower add up in another order."""
    flags = (flag, "2", "--threads", "1", "--preprocessing", stack.addresses["preprocessing"])
    encoder = Service("encoder", tiny_checkpoint, tmp_path, flags)
    asked = (Video(data=media.clip(seed=52)), Image(data=media.picture(112, 84)))
    with started(encoder):
        addresses = (encoder.address, stack.addresses["encoder"])
        ours, theirs = await asyncio.gather(*(encode(address, asked) for address in addresses))
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(one.values, other.values, atol=rounding, rtol=0, strict=True)
        (rank,) = children(encoder.pid)
        os.kill(rank, signal.SIGKILL)
        assert await asyncio.to_thread(encoder.ended) == ExitStatus.FAILED
    assert "rank 1 of 2 was ended by signal 9" in encoder.log()
    assert "a bug ended" not in encoder.log()
