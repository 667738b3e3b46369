"""Services whose engine or tower has failed for good: calls fail with UNAVAILABLE, and the process ends."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

import gridsieve.services.encoder.__main__ as encoder_process
import gridsieve.services.generation.__main__ as generation_process
from gridsieve.common.channels import upstream_errors
from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import Unavailable
from gridsieve.common.process import ExitStatus
from gridsieve.services.encoder.items.batcher import Batcher
from gridsieve.services.encoder.tower.tower import Tower
from gridsieve.services.generation.model.runner import Runner
from gridsieve.v1 import encoder_pb2_grpc, generation_pb2_grpc
from gridsieve.v1.generation_pb2 import GenerateRequest
from tests.common.loopback import TIMEOUT_S, serving
from tests.encoder.encoder_peers import VIDEO, FakePreprocessing
from tests.encoder.encoder_service import SELECT_ALL, first_request
from tests.generation.generation_peers import Preprocessing, prompt_message, prompt_plan


@asynccontextmanager
async def running(
    process: ModuleType, peer: object, folder: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[grpc.aio.Channel]:
    """Runs a service's main in this process until it ends by itself. Yields a channel to it that does not retry."""
    flags = f"--model {checkpoint} --preprocessing unix:{folder}/peer --metrics-port 0 --drain-s 5"
    monkeypatch.setattr(sys, "argv", ["service", "--listen", f"unix:{folder}/service", *flags.split()])
    monkeypatch.setattr(process, "configure_logging", lambda *_: None)
    monkeypatch.setattr(process, "leave_cores_to_others", lambda: None, raising=False)  # this process keeps its own
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    task = asyncio.create_task(process.main())
    try:
        async with (
            serving(f"unix:{folder}/peer", peer),
            grpc.aio.insecure_channel(f"unix:{folder}/service") as channel,
        ):
            await becomes("SERVING", channel)
            yield channel
        assert await asyncio.wait_for(task, TIMEOUT_S) is ExitStatus.FAILED
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


async def becomes(status: str, channel: grpc.aio.Channel) -> None:
    wanted = health_pb2.HealthCheckResponse.ServingStatus.Value(status)
    health = health_pb2_grpc.HealthStub(channel)
    async with asyncio.timeout(TIMEOUT_S):
        while (await health.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True)).status != wanted:
            await asyncio.sleep(0.02)


async def check_unavailable(call: Any, stage: str, why: str) -> None:
    with pytest.raises(Unavailable, match=why) as failed, upstream_errors("service"):
        _ = [each async for each in call]
    assert failed.value.stage == stage


def lost_device(*_: object) -> None:
    raise torch.AcceleratorError("an illegal memory access was encountered")


async def test_generation_with_a_failed_engine(
    tmp_path: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = prompt_plan(Checkpoint(tiny_checkpoint).fingerprint, 9)
    peer = Preprocessing(plan)
    async with running(generation_process, peer, tmp_path, tiny_checkpoint, monkeypatch) as channel:
        monkeypatch.setattr(Runner, "launch", lost_device)
        generate = generation_pb2_grpc.GenerationServiceStub(channel).Generate
        call = generate(GenerateRequest(prompt=prompt_message(plan)), timeout=TIMEOUT_S)
        await check_unavailable(call, "generation", "the engine of generation has failed")


async def test_an_encoder_with_a_failed_tower(
    tmp_path: Path, tiny_checkpoint: Path, tower: Tower, monkeypatch: pytest.MonkeyPatch
) -> None:
    fingerprint = Checkpoint(tiny_checkpoint).fingerprint
    peer = FakePreprocessing(
        tower.patches, tower.embed_levels, bend_plan=lambda plan: replace(plan, fingerprint=fingerprint)
    )
    async with running(encoder_process, peer, tmp_path, tiny_checkpoint, monkeypatch) as channel:
        monkeypatch.setattr(Batcher, "_forward", lost_device)
        encode = encoder_pb2_grpc.EncoderServiceStub(channel).Encode
        call = encode(iter([first_request([VIDEO]), SELECT_ALL]), timeout=TIMEOUT_S)
        await check_unavailable(call, "encoder", "the tower of the encoder has ended")
