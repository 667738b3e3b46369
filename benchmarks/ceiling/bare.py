"""A bare gRPC server: answers each call with N ready messages of one token. `python -m benchmarks.ceiling.bare ADDR N`.

What Python's gRPC alone allows on this machine.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from benchmarks.ceiling.service import TOKEN
from gridsieve.v1.generation_pb2 import Delta, GenerateRequest, GenerateResponse
from gridsieve.v1.generation_pb2_grpc import GenerationServiceServicer, add_GenerationServiceServicer_to_server


class Bare(GenerationServiceServicer):
    """Answers with so many messages."""

    def __init__(self, messages: int) -> None:
        self._messages = messages
        self._message = GenerateResponse(delta=Delta(text=" token", token_ids=[TOKEN]))

    async def Generate(
        self, request: GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[GenerateResponse]:
        for _ in range(self._messages):
            yield self._message


async def main(address: str, messages: int) -> None:
    server = grpc.aio.server()
    add_GenerationServiceServicer_to_server(Bare(messages), server)
    serving = health.aio.HealthServicer()
    await serving.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(serving, server)
    server.add_insecure_port(address)
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
