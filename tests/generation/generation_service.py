"""A generation service over a tiny checkpoint, with fake peers upstream and a client downstream."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from gridsieve.common.byte_semaphore import ByteSemaphore
from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.plan import Grid, Modality, PromptPlan
from gridsieve.common.contract.retention import EVS, METHODS, ItemPruning
from gridsieve.services.generation.engine.engine import Engine
from gridsieve.services.generation.loading import load_language_model
from gridsieve.services.generation.memory.blocks import BlockAllocator
from gridsieve.services.generation.memory.state_slots import StateSlots
from gridsieve.services.generation.model.language_model import LanguageModel
from gridsieve.services.generation.model.runner import Runner
from gridsieve.services.generation.model.states import RESERVED
from gridsieve.services.generation.rpc.servicer import GenerationServicer
from gridsieve.services.generation.sampling.defaults import SamplingDefaults
from gridsieve.services.generation.sampling.detokenizer import Tokenizer, load_tokenizer
from gridsieve.services.generation.served_model import ServedModel
from gridsieve.services.generation.upstream.media import MediaClient
from gridsieve.v1 import prompt_pb2
from gridsieve.v1.encoder_pb2 import EncodeResponse
from gridsieve.v1.generation_pb2 import GenerateRequest, GenerateResponse, Sampling
from gridsieve.v1.generation_pb2_grpc import GenerationServiceStub
from tests.generation.generation_peers import (
    Encoder,
    Preprocessing,
    embeds_messages,
    progress_message,
    prompt_message,
    prompt_plan,
    serving,
)

HIDDEN, CACHE_TOKENS, ROOM_BYTES, LIMIT = 64, 512, 2**16, 256
VIDEO = (Modality.VIDEO, Grid(4, 2, 3))
TEXT_BEFORE, TEXT_AFTER = 16, 5
KEPT = [*range(6), 9, 14, 15, 16, 20, 23]
HALF = prompt_pb2.Pruning(rate=0.5)
NOT_PRUNED = ItemPruning()


@dataclass
class Service:
    """A running generation service and its parts."""

    stub: GenerationServiceStub
    servicer: GenerationServicer
    engine: Engine
    room: ByteSemaphore
    encoder: Encoder
    preprocessing: Preprocessing

    def idle(self) -> bool:
        stats = self.engine.stats()
        held = (stats.blocks_used, stats.running, stats.waiting, stats.awaiting_media, self.room.held_bytes)
        return held == (0, 0, 0, 0, 0)

    def ask(self, plan: PromptPlan | None = None, **fields: Any) -> Any:
        fields = {"sampling": Sampling(max_new_tokens=5), "pruning": HALF} | fields
        return self.stub.Generate(GenerateRequest(prompt=prompt_message(plan or self.encoder.plan), **fields))

    def ask_text(self, **fields: Any) -> Any:
        return self.ask(self.preprocessing.plan, **fields)


def video_items() -> list[EncodeResponse]:
    embeds = np.random.default_rng(5).standard_normal((1, len(KEPT), HIDDEN), np.float32)
    return [progress_message(0, 4, 4), *embeds_messages(0, embeds, KEPT, repaired=2)]


@cache
def model_of(folder: Path) -> tuple[LanguageModel, Tokenizer]:
    """Model and tokenizer of a checkpoint, loaded once per process."""
    model = load_language_model(Checkpoint(folder), torch.float32, torch.device("cpu"))
    return model, load_tokenizer(folder)


@asynccontextmanager
async def service_of(
    folder: Path,
    checkpoint_folder: Path,
    max_requests: int = 8,
    eos_ids: tuple[int, ...] = (),
    encoder_channel: grpc.aio.Channel | None = None,
    preprocessing_channel: grpc.aio.Channel | None = None,
    pruning: ItemPruning = NOT_PRUNED,
    **encoder: Any,
) -> AsyncIterator[Service]:
    """encoder: arguments of the fake encoder. *_channel: to another peer instead of a fake one.

    pruning: of videos for which a request names none.
    """
    checkpoint = Checkpoint(checkpoint_folder)
    model, tokenizer = model_of(checkpoint_folder)
    blocks, slots = CACHE_TOKENS // 16, 16 if model.states else 0
    engine = Engine(
        Runner(model, blocks, 16, state_slots=slots),
        BlockAllocator(blocks, 16),
        64,
        4,
        max_requests - 4,
        states=StateSlots(slots, RESERVED) if slots else None,
    )
    engine.start()
    room = ByteSemaphore(ROOM_BYTES)
    defaults = SamplingDefaults(model.vocab_size, eos_ids=eos_ids)
    served = ServedModel.of(checkpoint, (), tokenizer, defaults, model, LIMIT, pruning, METHODS, EVS)
    encoder.setdefault("items", video_items())
    peers = (
        Encoder(prompt_plan(checkpoint.fingerprint, TEXT_BEFORE, VIDEO, TEXT_AFTER), **encoder),
        Preprocessing(prompt_plan(checkpoint.fingerprint, 9)),
    )
    try:
        async with serving(f"unix:{folder}/peers", *peers) as upstream:
            media = MediaClient(preprocessing_channel or upstream, encoder_channel or upstream, served.input, room)
            servicer = GenerationServicer(engine, media, served)
            async with serving(f"unix:{folder}/generation", servicer) as channel:
                yield Service(GenerationServiceStub(channel), servicer, engine, room, *peers)
    finally:
        engine.stop()


async def answers(call: Any) -> list[GenerateResponse]:
    responses = []
    while (response := await call.read()) is not grpc.aio.EOF:
        responses.append(response)
    return responses


def token_ids(responses: list[GenerateResponse]) -> list[int]:
    return [token for response in responses for token in response.delta.token_ids]


async def refused(call: Any) -> tuple[grpc.StatusCode, str, str]:
    """Status, reason and message of a call that fails."""
    with pytest.raises(grpc.aio.AioRpcError) as info:
        await answers(call)
    status = rpc_status.from_call(info.value)
    error = error_details_pb2.ErrorInfo()
    assert status is not None
    assert status.details[0].Unpack(error)
    return info.value.code(), error.reason, str(info.value.details())
