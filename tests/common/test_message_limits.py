"""Limits of a listener for messages, connections and pings."""

from __future__ import annotations

import sys
import weakref
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from gridsieve.common import channels
from gridsieve.common.channels import MAX_RESPONSE_BYTES, open_channel, read_from
from gridsieve.common.contract.errors import InvalidRequest, PeerContract
from gridsieve.common.security.quotas import ClientQuotas
from gridsieve.common.serving import guards
from gridsieve.common.serving.interceptors import RequestInterceptor
from gridsieve.v1 import encoder_pb2, encoder_pb2_grpc, prompt_pb2, tensor_pb2
from tests.common.guarded_service import METHOD, SERVICE, Echo, ask, guarded, refusal, select
from tests.common.loopback import TIMEOUT_S


class Flooding(encoder_pb2_grpc.EncoderServiceServicer):
    """Answers with as many bytes as the index that a request selects."""

    async def Encode(self, requests: AsyncIterator[encoder_pb2.EncodeRequest], context: object) -> AsyncIterator[bytes]:
        async for request in requests:
            yield encoder_pb2.EncodeResponse(
                embeds=encoder_pb2.EmbedsChunk(chunk=tensor_pb2.TensorChunk(data=bytes(request.select.media_index)))
            )


def request_of(size_bytes: int) -> bytes:
    """A valid request of that size, with a picture."""
    request = encoder_pb2.EncodeRequest()
    image = request.prompt.prompt.messages.add(role=prompt_pb2.ROLE_USER).parts.add().image
    image.data = bytes(size_bytes - 64)
    image.data += bytes(size_bytes - request.ByteSize())
    return request.SerializeToString()


async def test_a_request_above_the_limit_is_refused_and_the_service_goes_on(tmp_path: Path) -> None:
    limit = 2**20 + 4 * 2**20  # --max-inline-bytes, and 4 MiB of text
    echo = Echo()
    async with (
        guarded(f"unix:{tmp_path}/s", echo, max_inline_bytes=2**20) as service,
        open_channel(service.address) as channel,
    ):
        call = channel.stream_stream(METHOD)
        assert await call(iter([request_of(limit)]), timeout=TIMEOUT_S).read()
        with pytest.raises(
            InvalidRequest,
            match=rf"too large for encoder \({limit + 1} bytes, the limit is {limit}, set by --max-inline-bytes\); "
            "give larger files as an https URL or a file: path below --media-root, or upload them to .*/v1/files$",
        ):
            await read_from(call(iter([request_of(limit + 1)]), timeout=TIMEOUT_S), "encoder")
        assert len(echo.received) == 1
        assert await ask(channel, 7) == 7


async def test_a_response_above_the_limit_breaks_the_contract(tmp_path: Path) -> None:
    assert MAX_RESPONSE_BYTES == 8 * 2**20
    async with guarded(f"unix:{tmp_path}/s", Flooding()) as service, open_channel(service.address) as channel:
        stub = encoder_pb2_grpc.EncoderServiceStub(channel)
        answer = await read_from(stub.Encode(iter([select(MAX_RESPONSE_BYTES - 64)])), "encoder")
        assert len(answer.embeds.chunk.data) == MAX_RESPONSE_BYTES - 64
        with pytest.raises(PeerContract, match="sent a message above 8388608 bytes"):
            await read_from(stub.Encode(iter([select(MAX_RESPONSE_BYTES)])), "encoder")


class Large: ...


@pytest.mark.parametrize(
    ("kind", "streamed"),
    [(grpc.unary_stream_rpc_method_handler, False), (grpc.stream_stream_rpc_method_handler, True)],
    ids=["unary", "streamed"],
)
async def test_a_request_and_its_bytes_are_released_once_it_is_parsed_and_dropped(
    tmp_path: Path, kind: Callable[..., Any], streamed: bool
) -> None:
    """They may be 64 MiB of media, and the call runs for as long as its answer takes."""
    received: list[bytes] = []
    held: list[int] = []
    left: list[Large | None] = []

    def parse(data: bytes) -> Large:
        received.append(data)
        return Large()

    async def answer(request: Any, context: Any) -> AsyncIterator[bytes]:
        if streamed:
            request = await anext(aiter(request))
        seen = weakref.ref(request)
        del request
        left.append(seen())
        held.append(sys.getrefcount(received[0]))
        yield b""

    handler = kind(answer, request_deserializer=parse, response_serializer=bytes)
    server = grpc.aio.server(interceptors=[RequestInterceptor(ClientQuotas(), "test", None)])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Encode": handler}),))
    server.add_insecure_port(f"unix:{tmp_path}/s")
    await server.start()
    async with open_channel(f"unix:{tmp_path}/s") as channel:
        call = channel.stream_stream(METHOD)
        assert await call(iter([b"x" * 2**20]), timeout=TIMEOUT_S).read() == b""
        if not streamed:
            expected = (
                grpc.StatusCode.INVALID_ARGUMENT,
                "INVALID_REQUEST",
                "the call ended before its request arrived",
            )
            assert await refusal(call(iter([]), timeout=TIMEOUT_S).read()) == expected
    await server.stop(None)
    assert held == [sys.getrefcount(received[0])]  # `received` itself, and the call that counts
    assert left == [None]


def test_channels_ping_less_often_and_carry_no_more_calls_than_listeners_allow() -> None:
    listener, channel = dict(guards._OPTIONS), dict(channels._OPTIONS)
    assert channel["grpc.keepalive_time_ms"] >= 2 * listener["grpc.http2.min_ping_interval_without_data_ms"]
    assert channel["grpc.http2.max_pings_without_data"] == 0  # no limit
    assert listener["grpc.max_concurrent_streams"] == 2**14  # the sessions of a gateway share a connection
