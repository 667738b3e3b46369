"""Generation and the encoder as several processes: they answer as one process does, and end when one rank ends."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.contract.errors import Unavailable
from common.process import ExitStatus
from framesieve.cli.launcher import LocalStack
from framesieve.client.client import FramesieveClient
from framesieve.client.encoding import encode
from framesieve.client.prompt import Image, Video
from tests import media
from tests.awake import SOON_S, within
from tests.integration.fleet import Fleet, Service, children, runs, until
from tests.integration.load import endless, long_clip, short_clip

# Runs generation with a timeout of 6 s for each step of its ranks.
IMPATIENT = """
from datetime import timedelta
from torch.distributed.distributed_c10d import _set_pg_timeout
from common.serving.server import run
from services.generation.__main__ import main
from services.generation.parallel.group import Group
from services.generation.parallel.leading import Leading
watch = Leading.watch
Leading.watch = lambda self, on_lost: (watch(self, on_lost), _set_pg_timeout(timedelta(seconds=6)))
run(main)
"""
ENCODER_TOLERANCE = 1e-5
ENDED = "the tower of the encoder has ended: rank 1 of 2 was ended by signal 9"
SERVING = health_pb2.HealthCheckResponse.ServingStatus.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.ServingStatus.NOT_SERVING

Start = Callable[..., Service]


@pytest.fixture
def start(stack: LocalStack, adapted: Iterable[Path], checkpoint: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts generation with two ranks behind the preprocessing and the encoder of the stack."""
    upstream = [flag for name in ("preprocessing", "encoder") for flag in (f"--{name}", stack.addresses[name])]
    flags = ("--tensor-parallel", "2", "--threads", "1", "--drain-s", "10", *upstream)
    flags += ("--adapters", ",".join(f"{folder.name}={folder}" for folder in adapted))
    started: list[Service] = []

    def one(program: str | None = None) -> Service:
        service = Service("generation", checkpoint, tmp_path, flags, program=program)
        started.append(service)
        service.start()
        service.ready()
        return service

    yield one
    for each in started:
        each.close()


def rank_1(service: Service) -> int:
    """The process id of the other rank."""
    found = re.search(r'"others": \[(\d+)\]', service.log())
    assert found, service.log()
    return int(found[1])


async def test_two_ranks_of_generation_answer_as_one_and_end_when_one_is_killed(
    stack: LocalStack, adapted: Iterable[Path], start: Start
) -> None:
    clips = [media.clip(16, fps=4, seed=seed) for seed in (50, 51)]
    rates, adapters = (0.0, 0.75, 0.5), (None, *(folder.name for folder in adapted))

    async def answers(address: str) -> list[tuple[int, ...]]:
        async with FramesieveClient(address) as client:
            options = {"max_new_tokens": 12, "ignore_eos": True}
            asked = [
                client.ask(Video(data=clip), "What moves?", pruning_rate=rate, adapter=adapter, **options)
                for clip in clips
                for rate, adapter in zip(rates, adapters, strict=True)
            ]
            return [answer.token_ids for answer in await asyncio.gather(*asked)]

    service = start()
    assert await answers(service.address) == await answers(stack.address)
    async with FramesieveClient(service.address) as client:
        asked = endless(client)
        await until(lambda: asked.tokens)
        os.kill(rank_1(service), signal.SIGKILL)
        await asyncio.wait_for(asked.task, 60)
        assert isinstance(asked.failed, Unavailable)
        assert asked.failed.stage == "generation"
    assert await asyncio.to_thread(service.ended) == ExitStatus.FAILED
    assert "rank 1 of 2 was ended by signal 9" in service.log()
    assert "by a bug" not in service.log()


@pytest.mark.deep
async def test_ranks_of_generation_end_with_it_on_sigterm(start: Start) -> None:
    service = start()
    rank = rank_1(service)
    assert runs(rank)
    service.tell(signal.SIGTERM)
    assert await asyncio.to_thread(service.ended) == ExitStatus.FINISHED
    assert not runs(rank)


@pytest.mark.deep
async def test_a_rank_of_generation_that_hangs_ends_the_service(start: Start) -> None:
    service = start(IMPATIENT)
    async with FramesieveClient(service.address) as client:
        asked = endless(client)
        await until(lambda: asked.tokens)
        rank = rank_1(service)
        os.kill(rank, signal.SIGSTOP)
        await asyncio.wait_for(asked.task, 60)
        assert isinstance(asked.failed, Unavailable)
        assert asked.failed.stage == "generation"
    assert await asyncio.to_thread(service.ended) == ExitStatus.FAILED
    assert "the engine ended: ranks are out of step" in service.log()
    await until(lambda: not runs(rank))


# --- the encoder --------------------------------------------------------------------------------------------------


@pytest.fixture
def encoder(fleet: Fleet) -> Iterator[Service]:
    """An encoder with two ranks beside the one of the fleet, which has one rank and the same slow tower."""
    one_rank = fleet.encoder[0]
    two_ranks = Service("encoder", one_rank.model, one_rank.folder, (*one_rank.flags, "--data-parallel", "2"))
    two_ranks.start()
    try:
        two_ranks.ready()
        yield two_ranks
    finally:
        two_ranks.close()


async def test_two_ranks_of_the_encoder_encode_as_one_and_end_when_one_is_killed(
    fleet: Fleet, encoder: Service
) -> None:
    (rank,) = children(encoder.pid)
    before_s = processor_s(rank)
    asked = (short_clip(900), Image(data=media.picture(112, 84)))
    ours, theirs = await asyncio.gather(encode(encoder.address, asked), encode(fleet.encoder[0].address, asked))
    for one, other in zip(ours, theirs, strict=True):
        assert one.tensor.shape == other.tensor.shape
        np.testing.assert_allclose(one.values, other.values, atol=ENCODER_TOLERANCE, rtol=0)
    assert processor_s(rank) > before_s

    health = asyncio.create_task(health_after_serving(encoder.address))
    batches = encoder.metric("framesieve_encoder_batch_slices_count")
    encoding = asyncio.create_task(encode(encoder.address, long_clip(902)))
    await until(lambda: encoder.metric("framesieve_encoder_batch_slices_count") > batches + 2)
    os.kill(rank, signal.SIGKILL)
    with pytest.raises(Unavailable, match=ENDED) as failed:
        await within(SOON_S, encoding)
    assert failed.value.stage == "encoder"
    assert await within(SOON_S, health) == NOT_SERVING
    assert await asyncio.to_thread(encoder.ended) == ExitStatus.FAILED
    assert "rank 1 of 2 was ended by signal 9" in encoder.log()
    assert "by a bug" not in encoder.log()


def processor_s(process: int) -> float:
    """Processor time that it has used so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def health_after_serving(address: str) -> int:
    """The first status other than SERVING that health reports."""
    async with grpc.aio.insecure_channel(address) as channel:
        call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        async for each in call:
            if each.status != SERVING:
                return int(each.status)
    raise AssertionError("health never changed")
