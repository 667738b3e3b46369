"""Services whose engine or tower has failed for good: calls fail with UNAVAILABLE, and health is NOT_SERVING."""

from __future__ import annotations

import asyncio
import os
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

import services.encoder.__main__ as encoder_process
import services.generation.__main__ as generation_process
from common.channels import upstream_errors
from common.checkpoint import Checkpoint
from common.contract.errors import Unavailable
from common.process import ExitStatus
from framesieve.v1 import encoder_pb2_grpc, generation_pb2_grpc
from framesieve.v1.generation_pb2 import GenerateRequest
from services.encoder.items.batcher import Batcher
from services.encoder.tower.tower import Tower
from services.generation.model.runner import Runner
from tests.common.loopback import TIMEOUT_S, serving
from tests.encoder.encoder_peers import VIDEO, FakePreprocessing
from tests.encoder.encoder_service import SELECT_ALL, first_request
from tests.generation.generation_peers import Preprocessing, prompt_message, prompt_plan


@asynccontextmanager
async def running(
    process: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch, *flags: str
) -> AsyncIterator[grpc.aio.Channel]:
    """Runs a service's main in this process. Yields a channel to it that does not retry."""
    arguments = ["--listen", f"unix:{folder}/service", "--metrics-port", "0", "--drain-s", "5", *flags]
    monkeypatch.setattr(sys, "argv", ["service", *arguments])
    monkeypatch.setattr(process, "configure_logging", lambda *_: None)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    task = asyncio.create_task(process.main())
    try:
        async with grpc.aio.insecure_channel(f"unix:{folder}/service") as channel:
            await asyncio.wait_for(channel.channel_ready(), TIMEOUT_S)
            yield channel
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(task, TIMEOUT_S) is ExitStatus.FINISHED
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


async def becomes(status: str, channel: grpc.aio.Channel) -> None:
    wanted = health_pb2.HealthCheckResponse.ServingStatus.Value(status)
    health = health_pb2_grpc.HealthStub(channel)
    async with asyncio.timeout(TIMEOUT_S):
        while (await health.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True)).status != wanted:
            await asyncio.sleep(0.02)


async def read_all(call: Any) -> None:
    with upstream_errors("service"):
        async for _ in call:
            pass


def lost_device(*_: object) -> None:
    raise torch.AcceleratorError("an illegal memory access was encountered")


async def test_generation_with_a_failed_engine(
    tmp_path: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = prompt_plan(Checkpoint(tiny_checkpoint).fingerprint, 9)
    async with serving(f"unix:{tmp_path}/peer", Preprocessing(plan)):
        flags = ("--model", str(tiny_checkpoint), "--preprocessing", f"unix:{tmp_path}/peer")
        async with running(generation_process, tmp_path, monkeypatch, *flags) as channel:
            await becomes("SERVING", channel)
            monkeypatch.setattr(Runner, "run", lost_device)
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            for state in ("has failed", "has ended"):
                with pytest.raises(Unavailable, match=f"the engine of generation {state}") as failed:
                    await read_all(stub.Generate(GenerateRequest(prompt=prompt_message(plan)), timeout=TIMEOUT_S))
                assert failed.value.stage == "generation"
            await becomes("NOT_SERVING", channel)


async def test_an_encoder_with_a_failed_tower(
    tmp_path: Path, tiny_checkpoint: Path, tower: Tower, monkeypatch: pytest.MonkeyPatch
) -> None:
    fingerprint = Checkpoint(tiny_checkpoint).fingerprint
    peer = FakePreprocessing(
        tower.patches, tower.embed_levels, bend_plan=lambda plan: replace(plan, fingerprint=fingerprint)
    )
    async with serving(f"unix:{tmp_path}/peer", peer):
        flags = ("--model", str(tiny_checkpoint), "--preprocessing", f"unix:{tmp_path}/peer")
        async with running(encoder_process, tmp_path, monkeypatch, *flags) as channel:
            await becomes("SERVING", channel)
            monkeypatch.setattr(Batcher, "_forward", lost_device)
            stub = encoder_pb2_grpc.EncoderServiceStub(channel)
            for _ in range(2):
                with pytest.raises(Unavailable, match="the tower of the encoder has ended") as failed:
                    await read_all(stub.Encode(iter([first_request([VIDEO]), SELECT_ALL]), timeout=TIMEOUT_S))
                assert failed.value.stage == "encoder"
            await becomes("NOT_SERVING", channel)
