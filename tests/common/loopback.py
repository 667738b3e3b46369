"""Servers on loopback for servicers and for raw bytes, and waiting for conditions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from gridsieve.common.channels import MAX_RECEIVE_BYTES, open_channel
from gridsieve.common.security.quotas import ClientQuotas
from gridsieve.common.serving.interceptors import RequestInterceptor
from gridsieve.v1 import encoder_pb2_grpc, generation_pb2_grpc, preprocessing_pb2_grpc

TIMEOUT_S = 60
_POLLER = "PollerCompletionQueue._handle_events"
_REGISTRARS = (
    (encoder_pb2_grpc.EncoderServiceServicer, encoder_pb2_grpc.add_EncoderServiceServicer_to_server),
    (generation_pb2_grpc.GenerationServiceServicer, generation_pb2_grpc.add_GenerationServiceServicer_to_server),
    (
        preprocessing_pb2_grpc.PreprocessingServiceServicer,
        preprocessing_pb2_grpc.add_PreprocessingServiceServicer_to_server,
    ),
)


@asynccontextmanager
async def serving(address: str, *servicers: Any) -> AsyncIterator[grpc.aio.Channel]:
    """A server of these servicers, and a channel to it."""
    server = grpc.aio.server(
        interceptors=[RequestInterceptor(ClientQuotas(), "test", None)],
        options=[("grpc.max_receive_message_length", MAX_RECEIVE_BYTES)],
    )
    for servicer in servicers:
        (register,) = [register for kind, register in _REGISTRARS if isinstance(servicer, kind)]
        register(servicer, server)
    server.add_insecure_port(address)
    await server.start()
    try:
        async with open_channel(address) as channel:
            yield channel
    finally:
        await server.stop(None)


@asynccontextmanager
async def speaking(
    address: str, behaviours: Mapping[str, Any], options: Sequence[tuple[str, Any]] = ()
) -> AsyncIterator[None]:
    """A plain gRPC server of streaming methods, /package.Service/Method, whose messages are bytes."""
    server = grpc.aio.server(options=options)
    for path, behaviour in behaviours.items():
        _, service, method = path.split("/")
        handlers: Any = {method: grpc.stream_stream_rpc_method_handler(behaviour)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    server.add_insecure_port(address)
    await server.start()
    try:
        yield
    finally:
        await server.stop(None)


def logged(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Logged records, without those of grpc.aio's poller: it wakes all loops for one event, also those of other tests,
    and each that finds no event or is closed logs an error.
    """
    return [each for each in caplog.records if _POLLER not in each.getMessage()]


async def eventually(condition: Callable[[], object]) -> None:
    """Returns once the condition holds."""
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.005)
