"""Limits of a listener for messages, connections and pings."""

from __future__ import annotations

import asyncio
import struct
import sys
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from common import channels
from common.channels import MAX_ANSWER_BYTES, MAX_RECEIVE_BYTES, open_channel, read_from
from common.contract.errors import InvalidRequest, PeerContract
from common.serving import guards
from common.serving.interceptors import RequestInterceptor
from framesieve.v1 import encoder_pb2, encoder_pb2_grpc, prompt_pb2, tensor_pb2
from tests.common.guarded_service import METHOD, TIMEOUT_S, Echo, ask, guarded, refusal, select, tcp_address

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, PING, GOAWAY = 4, 6, 7
MAX_CONCURRENT_STREAMS = 3
ENHANCE_YOUR_CALM = 11


class Flooding(encoder_pb2_grpc.EncoderServiceServicer):
    """Answers with as many bytes as the index that a request selects."""

    async def Encode(self, requests: AsyncIterator[encoder_pb2.EncodeRequest], context: object) -> AsyncIterator[bytes]:
        async for request in requests:
            yield encoder_pb2.EncodeResponse(
                embeds=encoder_pb2.EmbedsChunk(chunk=tensor_pb2.TensorChunk(data=bytes(request.select.media_index)))
            )


def request_of(size_bytes: int) -> bytes:
    """A valid request of that size, with a picture."""
    empty = encoder_pb2.EncodeRequest()
    image = empty.prompt.prompt.messages.add(role=prompt_pb2.ROLE_USER).parts.add().image
    image.data = bytes(size_bytes - 64)
    image.data += bytes(size_bytes - empty.ByteSize())
    data = empty.SerializeToString()
    assert len(data) == size_bytes
    return data


async def test_requests_above_the_receive_limit_are_refused(tmp_path: Path) -> None:
    assert MAX_RECEIVE_BYTES == 20 * 2**20  # 16 MiB of media, 4 MiB of text
    echo = Echo()
    async with (
        guarded(f"unix:{tmp_path}/s", echo) as service,
        grpc.aio.insecure_channel(service.address, [("grpc.max_send_message_length", -1)]) as channel,
    ):
        call = channel.stream_stream(METHOD)
        assert await call(iter([request_of(MAX_RECEIVE_BYTES)]), timeout=TIMEOUT_S).read()
        code, _, message = await refusal(call(iter([request_of(MAX_RECEIVE_BYTES + 1)]), timeout=TIMEOUT_S).read())
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert f"({MAX_RECEIVE_BYTES + 1} vs. {MAX_RECEIVE_BYTES})" in message
        assert len(echo.received) == 1
        assert await ask(channel, 7) == 7  # the service goes on


async def test_a_response_above_the_limit_breaks_the_contract(tmp_path: Path) -> None:
    assert MAX_ANSWER_BYTES == 8 * 2**20
    async with guarded(f"unix:{tmp_path}/s", Flooding()) as service, open_channel(service.address) as channel:
        stub = encoder_pb2_grpc.EncoderServiceStub(channel)
        answer = await read_from(stub.Encode(iter([select(MAX_ANSWER_BYTES - 64)])), "encoder")
        assert len(answer.embeds.chunk.data) == MAX_ANSWER_BYTES - 64
        with pytest.raises(PeerContract, match="sent a message above 8388608 bytes"):
            await read_from(stub.Encode(iter([select(MAX_ANSWER_BYTES)])), "encoder")


@pytest.mark.parametrize("own_limit", [True, False])
async def test_a_too_large_request_is_an_invalid_request(tmp_path: Path, own_limit: bool) -> None:
    """own_limit: whether the caller's channel refuses it already."""
    unlimited = [("grpc.max_send_message_length", -1)]
    async with guarded(f"unix:{tmp_path}/s", Echo()) as service:
        address = service.address
        async with open_channel(address) if own_limit else grpc.aio.insecure_channel(address, unlimited) as channel:
            call = channel.stream_stream(METHOD)(iter([request_of(MAX_RECEIVE_BYTES + 1)]), timeout=TIMEOUT_S)
            with pytest.raises(
                InvalidRequest, match=rf"at most {MAX_RECEIVE_BYTES} bytes: .*\({MAX_RECEIVE_BYTES + 1} "
            ):
                await read_from(call, "encoder")


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_bytes_of_a_parsed_request_are_released(tmp_path: Path, streamed: bool) -> None:
    """They may be 16 MiB of media, and the call runs for as long as its answer takes."""
    received: list[bytes] = []
    held: list[int] = []

    def parse(data: bytes) -> encoder_pb2.EncodeRequest:
        received.append(data)
        return encoder_pb2.EncodeRequest.FromString(data)

    async def answer(request: Any, context: Any) -> AsyncIterator[bytes]:
        if streamed:
            await anext(aiter(request))
        held.append(sys.getrefcount(received[0]))
        yield b""

    handler = grpc.stream_stream_rpc_method_handler if streamed else grpc.unary_stream_rpc_method_handler
    server = grpc.aio.server(interceptors=[RequestInterceptor()])
    methods = {"Encode": handler(answer, request_deserializer=parse, response_serializer=bytes)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("framesieve.v1.EncoderService", methods),))
    server.add_insecure_port(f"unix:{tmp_path}/s")
    await server.start()
    async with open_channel(f"unix:{tmp_path}/s") as channel:
        call = channel.stream_stream(METHOD)
        assert await call(iter([request_of(2**20)]), timeout=TIMEOUT_S).read() == b""
        if not streamed:
            expected = (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", "the call ended without its request")
            assert await refusal(call(iter([]), timeout=TIMEOUT_S).read()) == expected
    await server.stop(None)
    assert held == [sys.getrefcount(received[0])]  # `received` itself, and the call that counts


async def test_a_unary_request_is_released_when_its_method_drops_it(tmp_path: Path) -> None:
    """It holds the media."""

    class Large: ...

    left: list[Large | None] = []

    async def answer(request: Any, context: Any) -> AsyncIterator[bytes]:
        seen = weakref.ref(request)
        del request
        left.append(seen())
        yield b""

    server = grpc.aio.server(interceptors=[RequestInterceptor()])
    handler = grpc.unary_stream_rpc_method_handler(
        answer, request_deserializer=lambda _: Large(), response_serializer=bytes
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("framesieve.v1.GenerationService", {"Generate": handler}),)
    )
    server.add_insecure_port(f"unix:{tmp_path}/s")
    await server.start()
    async with open_channel(f"unix:{tmp_path}/s") as channel:
        call = channel.unary_stream("/framesieve.v1.GenerationService/Generate")(b"x", timeout=TIMEOUT_S)
        assert await call.read() == b""
    await server.stop(None)
    assert left == [None]


def test_channels_ping_less_often_than_listeners_allow() -> None:
    listener, channel = dict(guards._OPTIONS), dict(channels._OPTIONS)
    assert channel["grpc.keepalive_time_ms"] >= 2 * listener["grpc.http2.min_ping_interval_without_data_ms"]
    assert channel["grpc.http2.max_pings_without_data"] == 0  # no limit
    assert listener["grpc.keepalive_time_ms"] + listener["grpc.keepalive_timeout_ms"] == 80_000
    assert listener["grpc.max_connection_age_ms"] == 300_000


# --- connections, in raw HTTP/2 frames ----------------------------------------------------------------


def frame(kind: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, 0]) + bytes(4) + payload


async def frames(reader: asyncio.StreamReader) -> AsyncIterator[tuple[int, bytes]]:
    """Kind and payload of each frame, until the connection ends."""
    while head := await reader.read(9):
        head += await reader.readexactly(9 - len(head))
        yield head[3], await reader.readexactly(int.from_bytes(head[:3], "big"))


async def test_a_connection_has_at_most_1024_calls() -> None:
    async with guarded(tcp_address(), Echo()) as service:
        reader, writer = await asyncio.open_connection(*service.address.split(":"))
        writer.write(PREFACE + frame(SETTINGS))
        async with asyncio.timeout(TIMEOUT_S):
            kind, payload = await anext(frames(reader))
        assert kind == SETTINGS
        assert dict(struct.iter_unpack(">HI", payload))[MAX_CONCURRENT_STREAMS] == 1024
        writer.close()


async def test_a_client_that_pings_too_often_is_disconnected() -> None:
    async with guarded(tcp_address(), Echo()) as service:
        reader, writer = await asyncio.open_connection(*service.address.split(":"))
        writer.write(PREFACE + frame(SETTINGS) + frame(PING, bytes(8)) * 10)
        async with asyncio.timeout(TIMEOUT_S):
            came = dict([each async for each in frames(reader)])  # until the listener closes it
        assert int.from_bytes(came[GOAWAY][4:8], "big") == ENHANCE_YOUR_CALM
        writer.close()
