"""An encoder of two processes: it encodes as one process does, and ends when one of them ends."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.contract.errors import Unavailable
from common.process import ExitStatus
from framesieve.client.encoding import encode
from framesieve.client.prompt import Image
from tests import media
from tests.awake import SOON_S, within
from tests.integration.fleet import Fleet, Service, children, until
from tests.integration.load import long_clip, short_clip

TOLERANCE = 1e-5
ENDED = "the tower of the encoder has ended: rank 1 of 2 was ended by signal 9"
SERVING = health_pb2.HealthCheckResponse.ServingStatus.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.ServingStatus.NOT_SERVING


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


@pytest.mark.deep
async def test_two_ranks_of_the_encoder_encode_as_one_and_end_when_one_is_killed(
    fleet: Fleet, encoder: Service
) -> None:
    (rank,) = children(encoder.pid)
    before_s = processor_s(rank)
    asked = (short_clip(900), Image(data=media.picture(112, 84)))
    ours, theirs = await asyncio.gather(encode(encoder.address, asked), encode(fleet.encoder[0].address, asked))
    for one, other in zip(ours, theirs, strict=True):
        assert one.tensor.shape == other.tensor.shape
        np.testing.assert_allclose(one.values, other.values, atol=TOLERANCE, rtol=0)
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
