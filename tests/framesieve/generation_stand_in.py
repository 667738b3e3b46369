"""A hand-written generation service on a unix socket, and a client that asks it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from common.serving.interceptors import RequestInterceptor
from framesieve import FramesieveClient
from framesieve.v1 import encoder_pb2, generation_pb2, generation_pb2_grpc, prompt_pb2

MIB = 2**20
Behaviour = Callable[[generation_pb2.GenerateRequest, Any], AsyncIterator[generation_pb2.GenerateResponse]]


class FakeGeneration(generation_pb2_grpc.GenerationServiceServicer):
    """Answers every question in the way a test says, and remembers what it was asked."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.requests: list[generation_pb2.GenerateRequest] = []
        self.metadata: dict[str, Any] = {}
        self.cancelled = asyncio.Event()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[generation_pb2.GenerateResponse]:
        self.requests.append(request)
        self.metadata = dict(context.invocation_metadata())
        try:
            async for response in self.behaviour(request, context):
                yield response
        except (asyncio.CancelledError, GeneratorExit):  # the latter where gRPC is still writing the last response
            self.cancelled.set()
            raise


USAGE = generation_pb2.Usage(
    prompt_tokens_full=100,
    prompt_tokens=30,
    media=[
        generation_pb2.MediaUsage(
            modality=prompt_pb2.MODALITY_VIDEO,
            grid=prompt_pb2.Grid(t=4, h=5, w=4),
            kept_tokens=20,
            repaired_frames=1,
            first_slice_only=True,
        )
    ],
)


async def moving_ball(request: generation_pb2.GenerateRequest, context: Any) -> AsyncIterator[Any]:
    yield generation_pb2.GenerateResponse(accepted=generation_pb2.Accepted(request_id="r1", usage=USAGE))
    yield generation_pb2.GenerateResponse(
        progress=encoder_pb2.MediaProgress(media_index=0, decoded_slices=4, encoded_slices=3)
    )
    for text, token, logprob in (("A ", 5, -0.5), ("ball", 6, -0.25)):
        yield generation_pb2.GenerateResponse(
            delta=generation_pb2.Delta(text=text, token_ids=[token], logprobs=[logprob])
        )
    usage = generation_pb2.Usage()
    usage.CopyFrom(USAGE)
    usage.completion_tokens = 2
    timings = generation_pb2.Timings(time_to_first_token_s=0.75, plan_s=0.25, decode_s=0.5, generate_s=0.5)
    yield generation_pb2.GenerateResponse(
        finished=generation_pb2.Finished(reason=generation_pb2.FINISH_REASON_STOP, usage=usage, timings=timings)
    )


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
