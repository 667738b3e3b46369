"""The rows of a video that an encoder has sent are prefilled while its tower, elsewhere, works on the others."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest

from demo.checkpoint import TINY, write_checkpoint
from gridsieve.common.channels import open_channel
from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.plan import Grid, Modality, PromptPlan
from gridsieve.common.contract.wire import plan_messages
from gridsieve.v1 import encoder_pb2_grpc
from gridsieve.v1.encoder_pb2 import EncodeRequest, EncodeResponse
from gridsieve.v1.generation_pb2 import GenerateRequest, Sampling
from gridsieve.v1.generation_pb2_grpc import GenerationServiceStub
from tests.common.loopback import serving
from tests.generation.generation_peers import Preprocessing, part_messages, prompt_message, prompt_plan
from tests.integration.fleet import Service

# Generation that takes its encoder to be on another host: on one CPU, items come whole.
_ON_ANOTHER_HOST = """
from gridsieve.common.serving.server import run
from gridsieve.services.generation import __main__ as service
service.is_local = lambda address: False
run(service.main)
"""
GRID = Grid(16, 12, 12)
ROUNDS = 3
TRIES = 3


@dataclass
class SlowTower(encoder_pb2_grpc.EncoderServiceServicer):
    """An encoder that takes `tower_s` for all slices, and sends them one by one, or together after the last."""

    plan: PromptPlan
    embeds: np.ndarray[Any, np.dtype[np.float32]]
    tower_s: float = 0.0
    in_parts: bool = False

    async def Encode(self, requests: AsyncIterator[EncodeRequest], context: Any) -> AsyncIterator[EncodeResponse]:
        await anext(requests)
        for message in plan_messages(self.plan):
            yield EncodeResponse(plan=message)
        assert [request.select.parts async for request in requests] == [True]
        loop, slices = asyncio.get_running_loop(), np.split(self.embeds, GRID.t, axis=1)
        began_s = loop.time()
        for number, rows in enumerate(slices, 1):
            await asyncio.sleep(began_s + self.tower_s * number / GRID.t - loop.time())
            if self.in_parts:
                for message in part_messages(0, rows, None, 1 if number < GRID.t else None, piece_bytes=2**20):
                    yield message
        if not self.in_parts:
            for message in part_messages(0, self.embeds, None, None, piece_bytes=2**20):
                yield message


async def first_token(stub: Any, encoder: SlowTower) -> tuple[list[int], float, float]:
    """The answer to a question about a new clip, the seconds to its first token, and those of them in prefill."""
    (video,) = encoder.plan.media
    encoder.plan = replace(encoder.plan, media=(replace(video, content_hash=os.urandom(32)),))
    call = stub.Generate(GenerateRequest(prompt=prompt_message(encoder.plan), sampling=Sampling(max_new_tokens=2)))
    answers = [response async for response in call]
    timings = answers[-1].finished.timings
    ids = [token for each in answers for token in each.delta.token_ids]
    return ids, timings.time_to_first_token_s, timings.prefill_s


async def ratio_to_whole(stub: Any, encoder: SlowTower) -> float:
    """The median time to the first token in parts over that of whole items. The tower takes as long as prefill."""
    encoder.tower_s, encoder.in_parts = 0.0, False
    encoder.tower_s = median([(await first_token(stub, encoder))[2] for _ in range(ROUNDS)])
    took_s: dict[bool, list[float]] = {False: [], True: []}
    said: set[tuple[int, ...]] = set()
    for _ in range(ROUNDS):
        for encoder.in_parts in took_s:
            ids, seconds, _ = await first_token(stub, encoder)
            took_s[encoder.in_parts].append(seconds)
            said.add(tuple(ids))
    assert len(said) == 1
    return median(took_s[True]) / median(took_s[False])


@pytest.mark.deep  # it compares times, of which a busy machine has none to spare
async def test_the_first_token_comes_soon_after_the_tower_where_both_take_equal_time(tmp_path: Path) -> None:
    shape = replace(TINY, hidden=384, layers=4, heads=6, intermediate=1152, mrope_section=(8, 12, 12))
    model = write_checkpoint(tmp_path / "model", shape, seed=3)
    plan = prompt_plan(Checkpoint(model).fingerprint, 16, (Modality.VIDEO, GRID), 8)
    embeds = np.random.default_rng(2).normal(0, 0.3, (1, GRID.tokens, shape.hidden)).astype(np.float32)
    encoder, address = SlowTower(plan, embeds), f"unix:{tmp_path}/peers"
    flags = ("--encoder", address, "--preprocessing", address, "--threads", "1", "--compile", "off")
    flags = (*flags, "--max-num-batched-tokens", "4096")
    generation = Service("generation", model, tmp_path, flags, program=_ON_ANOTHER_HOST)
    async with serving(address, encoder, Preprocessing(plan)):
        generation.start()
        try:
            await asyncio.to_thread(generation.ready)
            async with open_channel(generation.address) as channel:
                stub = GenerationServiceStub(channel)
                ratios = [await ratio_to_whole(stub, encoder)]
                while ratios[-1] > 0.6 and len(ratios) < TRIES:  # other processes took the cores
                    ratios.append(await ratio_to_whole(stub, encoder))
        finally:
            generation.close()
    assert min(ratios) <= 0.6
