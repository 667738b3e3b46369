"""A listener with the guards of its settings, in front of an encoder that only echoes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.reflection import enable_server_reflection
from grpc_status import rpc_status

from gridsieve.common.process import free_port
from gridsieve.common.security.quotas import ClientQuotas
from gridsieve.common.serving.guards import guarded_server, listen
from gridsieve.common.serving.health import Health
from gridsieve.common.serving.settings import ServiceSettings
from gridsieve.v1 import encoder_pb2, encoder_pb2_grpc, prompt_pb2
from tests.common.loopback import TIMEOUT_S

SERVICE = "gridsieve.v1.EncoderService"
METHOD = f"/{SERVICE}/Encode"
ALICE, BOB = "alice-0123456789abcdef", "bob-fedcba9876543210"


def shown(token: str) -> dict[str, Any]:
    """Keyword arguments of a call with this token."""
    return {"metadata": (("authorization", f"Bearer {token}"),)}


class Echo(encoder_pb2_grpc.EncoderServiceServicer):
    """Answers each request with the index that it selects; -1 raises."""

    def __init__(self) -> None:
        self.received: list[encoder_pb2.EncodeRequest] = []
        self.calls = 0

    async def Encode(
        self, requests: AsyncIterator[encoder_pb2.EncodeRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[encoder_pb2.EncodeResponse]:
        self.calls += 1
        async for request in requests:
            self.received.append(request)
            if request.select.media_index < 0:
                raise ZeroDivisionError
            yield encoder_pb2.EncodeResponse(progress=encoder_pb2.MediaProgress(media_index=request.select.media_index))


@dataclass
class GuardedService:
    address: str
    quotas: ClientQuotas
    health: Health


@asynccontextmanager
async def guarded(
    address: str, encoder: encoder_pb2_grpc.EncoderServiceServicer, **settings: Any
) -> AsyncIterator[GuardedService]:
    given = ServiceSettings(listen=address, metrics_port=0, **settings)
    quotas, health = ClientQuotas(given.max_requests_per_client, given.max_bytes_per_client), Health(("", SERVICE))
    server, _ = guarded_server(given, quotas, "encoder")
    encoder_pb2_grpc.add_EncoderServiceServicer_to_server(encoder, server)
    health.add_to(server)
    health.set_serving(True)
    enable_server_reflection((SERVICE,), server)
    listen(server, given)
    await server.start()
    try:
        yield GuardedService(address, quotas, health)
    finally:
        await server.stop(None)


def tcp_address() -> str:
    return f"127.0.0.1:{free_port()}"


def select(index: int) -> encoder_pb2.EncodeRequest:
    return encoder_pb2.EncodeRequest(select=prompt_pb2.Select(media_index=index))


def encode_of(channel: grpc.aio.Channel) -> Any:
    """Encode with a single request: gRPC may report INTERNAL for a stream that is refused while its caller writes."""
    return channel.unary_stream(
        METHOD,
        request_serializer=encoder_pb2.EncodeRequest.SerializeToString,
        response_deserializer=encoder_pb2.EncodeResponse.FromString,
    )


async def ask(channel: grpc.aio.Channel, index: int = 7, **call: Any) -> int:
    """Selects an item and returns the index of the answer."""
    response = await encode_of(channel)(select(index), timeout=TIMEOUT_S, **call).read()
    return int(response.progress.media_index)


async def well(channel: grpc.aio.Channel) -> bool:
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def refusal(answer: Any) -> tuple[grpc.StatusCode, str, str]:
    """Status, reason and message of a call that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as info:
        await asyncio.wait_for(answer, TIMEOUT_S)
    status = rpc_status.from_call(info.value)
    error = error_details_pb2.ErrorInfo()
    assert not (status and status.details) or status.details[0].Unpack(error)
    return info.value.code(), error.reason, str(info.value.details())
