"""An encoder of two ranks, processes on the CPU: it answers as one rank does, and ends as a whole where one ends."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.contract.errors import Unavailable
from common.process import ExitStatus
from framesieve.client.client import FramesieveClient
from framesieve.client.encoding import encode
from framesieve.client.prompt import Image
from tests import media
from tests.awake import SOON_S, within
from tests.integration.fleet import Fleet, Service, children, runs, until
from tests.integration.load import long_clip, short_clip

TOLERANCE = 1e-5
ENDED = "the tower of the encoder has ended: rank 1 of 2 was ended by signal 9"
HEALTH = health_pb2.HealthCheckResponse.ServingStatus


@pytest.fixture
def encoder(fleet: Fleet) -> Iterator[Service]:
    """Of two ranks, beside the fleet's own of one, which is as slow."""
    one_rank = fleet.encoder[0]
    two_ranks = Service("encoder", one_rank.model, one_rank.folder, (*one_rank.flags, "--data-parallel", "2"))
    two_ranks.start()
    try:
        two_ranks.ready()
        yield two_ranks
    finally:
        two_ranks.close()


@pytest.fixture
async def client(fleet: Fleet, encoder: Service) -> AsyncIterator[FramesieveClient]:
    """Of generation over that encoder."""
    upstream = ("--preprocessing", fleet.preprocessing[0].address, "--encoder", encoder.address, "--threads", "1")
    generation = Service("generation", encoder.model, encoder.folder, upstream)
    generation.start()
    try:
        await asyncio.to_thread(generation.ready)
        async with FramesieveClient(generation.address) as connected:
            yield connected
    finally:
        generation.close()


def worked_s(process: int) -> float:
    """Processor time that it has used."""
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def test_two_ranks_answer_as_one_does_and_leave_with_their_service(
    fleet: Fleet, encoder: Service, client: FramesieveClient
) -> None:
    (rank,) = children(encoder.pid)
    before_s = worked_s(rank)
    seen = (short_clip(900), Image(data=media.picture(112, 84)))
    ours, theirs = await asyncio.gather(encode(encoder.address, seen), encode(fleet.encoder[0].address, seen))
    for one, other in zip(ours, theirs, strict=True):
        assert one.tensor.shape == other.tensor.shape
        np.testing.assert_allclose(one.values, other.values, atol=TOLERANCE, rtol=0)
    assert worked_s(rank) > before_s

    async with FramesieveClient(fleet.generation.address) as other_client:
        answers = [
            await each.ask(short_clip(901), "What moves?", pruning_rate=0.75, temperature=0, max_new_tokens=8)
            for each in (client, other_client)
        ]
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[0].usage.media == answers[1].usage.media

    encoder.tell(signal.SIGTERM)
    assert await asyncio.to_thread(encoder.ended) == ExitStatus.FINISHED
    assert not runs(rank)


async def test_a_rank_that_is_killed_ends_the_service_and_callers_are_told(encoder: Service) -> None:
    (rank,) = children(encoder.pid)
    health = asyncio.create_task(health_after_serving(encoder.address))
    asked = asyncio.create_task(encode(encoder.address, long_clip(902)))
    await until(lambda: encoder.metric("framesieve_encoder_batch_slices_count") > 2)
    os.kill(rank, signal.SIGKILL)
    with pytest.raises(Unavailable, match=ENDED) as told:
        await within(SOON_S, asked)
    assert told.value.stage == "encoder"
    assert await within(SOON_S, health) == HEALTH.NOT_SERVING
    assert await asyncio.to_thread(encoder.ended) == ExitStatus.FAILED
    assert "rank 1 of 2 was ended by signal 9" in encoder.log()
    assert "by a bug" not in encoder.log()


async def health_after_serving(address: str) -> int:
    """What health says next once it has said SERVING."""
    async with grpc.aio.insecure_channel(address) as channel:
        call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        async for each in call:
            if each.status != HEALTH.SERVING:
                return int(each.status)
    raise AssertionError("it was never told")
