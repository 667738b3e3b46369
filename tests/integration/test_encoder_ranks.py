"""An encoder of two processes: it encodes as one process does, and ends when one of them ends."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from gridsieve.client.encoding import encode
from gridsieve.client.prompt import Image
from gridsieve.common.contract.errors import Unavailable
from gridsieve.common.process import ExitStatus
from tests import media
from tests.awake import SOON_S, within
from tests.integration.fleet import Fleet, Service, until
from tests.integration.load import long_clip, short_clip
from tests.processes import children

ENDED = "the tower of the encoder has ended: rank 1 of 2 was ended by signal 9"


@pytest.mark.deep
@pytest.mark.parametrize(("flag", "rounding"), [("--data-parallel", 1e-5), ("--tower-tensor-parallel", 2e-4)])
async def test_two_ranks_of_the_encoder_encode_as_one_and_end_when_one_is_killed(
    fleet: Fleet, flag: str, rounding: float
) -> None:
    """rounding: of values up to 30, which the ranks of a divided tower add up in another order."""
    one_rank = fleet.encoder[0]
    encoder = Service("encoder", one_rank.model, one_rank.folder, (*one_rank.flags, flag, "2"))
    encoder.start()
    try:
        await asyncio.to_thread(encoder.ready)
        (rank,) = children(encoder.pid)
        before = cpu_ticks(rank)
        asked = (short_clip(900), Image(data=media.picture(112, 84)))
        ours, theirs = await asyncio.gather(encode(encoder.address, asked), encode(one_rank.address, asked))
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(one.values, other.values, atol=rounding, rtol=0, strict=True)
        assert cpu_ticks(rank) > before

        batches = encoder.metric("gridsieve_encoder_batch_slices_count")
        encoding = asyncio.create_task(encode(encoder.address, long_clip(902)))
        await until(lambda: encoder.metric("gridsieve_encoder_batch_slices_count") > batches + 2)
        os.kill(rank, signal.SIGKILL)
        with pytest.raises(Unavailable, match=ENDED) as failed:
            await within(SOON_S, encoding)
        assert failed.value.stage == "encoder"
        assert await asyncio.to_thread(encoder.ended) == ExitStatus.FAILED
        assert "a bug ended" not in encoder.log()
    finally:
        encoder.close()


def cpu_ticks(process: int) -> int:
    """Processor time that it has used so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])
