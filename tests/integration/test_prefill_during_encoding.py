"""The rows of a video that an encoder elsewhere has sent are prefilled while its tower works on the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from demo.checkpoint import TINY
from gridsieve.common.channels import open_channel
from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.plan import Grid, Modality, PromptPlan
from gridsieve.common.contract.wire import plan_messages
from gridsieve.common.process import free_port
from gridsieve.v1 import encoder_pb2_grpc
from gridsieve.v1.encoder_pb2 import EncodeRequest, EncodeResponse
from gridsieve.v1.generation_pb2 import GenerateRequest, Sampling
from gridsieve.v1.generation_pb2_grpc import GenerationServiceStub
from tests.common.loopback import serving
from tests.generation.generation_peers import Preprocessing, part_messages, prompt_message, prompt_plan
from tests.integration.fleet import Service, until

GRID = Grid(4, 6, 6)


class WaitingTower(encoder_pb2_grpc.EncoderServiceServicer):
    """An encoder whose last slice is done once generation has computed the rows of the first one."""

    def __init__(self, plan: PromptPlan, generation: Service) -> None:
        self._plan, self._generation = plan, generation

    async def Encode(self, requests: AsyncIterator[EncodeRequest], context: Any) -> AsyncIterator[EncodeResponse]:
        await anext(requests)
        for message in plan_messages(self._plan):
            yield EncodeResponse(plan=message)
        assert [request.select.parts async for request in requests] == [True]
        shape = (1, GRID.tokens, TINY.hidden)
        embeds = np.random.default_rng(2).normal(0, 0.3, shape).astype(np.float32)
        first, rest = np.split(embeds, [GRID.slice_tokens], axis=1)
        for message in part_messages(0, first, None, 1):
            yield message
        await until(self._first_is_prefilled)
        for message in part_messages(0, rest, None, None):
            yield message

    def _first_is_prefilled(self) -> bool:
        return (
            self._generation.metric("gridsieve_generation_computed_tokens_total", phase="prefill") > GRID.slice_tokens
        )


@pytest.mark.deep
async def test_what_has_arrived_is_prefilled_before_the_rest_comes(tiny_checkpoint: Path, tmp_path: Path) -> None:
    plan, port = prompt_plan(Checkpoint(tiny_checkpoint).fingerprint, 16, (Modality.VIDEO, GRID), 8), free_port()
    elsewhere = f"ipv4:127.0.0.1:{port}"  # a name that does not tell that it is this host
    flags = ("--encoder", elsewhere, "--preprocessing", elsewhere)
    generation = Service("generation", tiny_checkpoint, tmp_path, flags)
    async with serving(f"127.0.0.1:{port}", WaitingTower(plan, generation), Preprocessing(plan)):
        generation.start()
        try:
            await asyncio.to_thread(generation.ready)
            async with open_channel(generation.address) as channel:
                sampling = Sampling(max_new_tokens=2, ignore_eos=True)
                asked = GenerateRequest(prompt=prompt_message(plan), sampling=sampling)
                *_, last = [response async for response in GenerationServiceStub(channel).Generate(asked, timeout=60)]
        finally:
            generation.close()
    assert last.finished.usage.completion_tokens == 2
