"""A generation service whose responses a test writes by hand, on a unix socket, and a client connected to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from common.serving.interceptors import RequestInterceptor
from framesieve import FramesieveClient
from framesieve.v1 import generation_pb2_grpc
from framesieve.v1.generation_pb2 import FINISH_REASON_STOP, Delta, Finished, GenerateResponse, Timings, TopLogprobs
from framesieve.v1.generation_pb2 import Usage as UsageMessage

MIB = 2**20
Behaviour = Callable[[Any, Any], AsyncIterator[GenerateResponse]]


class FakeGeneration(generation_pb2_grpc.GenerationServiceServicer):
    """Runs a behaviour for every request and records the requests."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.requests: list[Any] = []
        self.metadata: dict[str, Any] = {}
        self.cancelled = asyncio.Event()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[GenerateResponse]:
        self.requests.append(request)
        self.metadata = dict(context.invocation_metadata())
        try:
            async for response in self.behaviour(request, context):
                yield response
        except (asyncio.CancelledError, GeneratorExit):  # the latter if gRPC is still writing the last response
            self.cancelled.set()
            raise


@asynccontextmanager
async def served(tmp_path: Path, behaviour: Behaviour) -> AsyncIterator[tuple[FramesieveClient, FakeGeneration]]:
    fake = FakeGeneration(behaviour)
    address = f"unix:{tmp_path}/generation.sock"
    server = grpc.aio.server(
        interceptors=[RequestInterceptor()], options=[("grpc.max_receive_message_length", 20 * MIB)]
    )
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(fake, server)
    server.add_insecure_port(address)
    await server.start()
    try:
        async with FramesieveClient(address) as client:
            yield client, fake
    finally:
        await server.stop(0)


def responding(*responses: GenerateResponse) -> Behaviour:
    async def respond(request: Any, context: Any) -> AsyncIterator[GenerateResponse]:
        for response in responses:
            yield response

    return respond


def delta(index: int, text: str, *token_ids: int) -> GenerateResponse:
    """Every token's log-probability is minus its id, also among its top tokens: itself and its successor."""
    tops = [TopLogprobs(token_ids=[one, one + 1], logprobs=[-one, -one - 1]) for one in token_ids]
    logprobs = [-one for one in token_ids]
    return GenerateResponse(
        delta=Delta(choice_index=index, text=text, token_ids=token_ids, logprobs=logprobs, top_logprobs=tops)
    )


def finished(index: int, tokens: int, generate_s: float, reason: Any = FINISH_REASON_STOP) -> GenerateResponse:
    usage = UsageMessage(prompt_tokens_full=9, prompt_tokens=8, completion_tokens=tokens, cached_prompt_tokens=4)
    timings = Timings(time_to_first_token_s=0.75, plan_s=0.25, decode_s=0.5, generate_s=generate_s)
    return GenerateResponse(finished=Finished(choice_index=index, reason=reason, usage=usage, timings=timings))
