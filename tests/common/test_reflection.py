"""Reflection as tools ask it, and before callers who ask at length, ask often or leave in the middle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest, ServerReflectionResponse
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub

from common.serving import reflection
from tests.common.guarded_service import TIMEOUT_S, Echo, GuardedService, guarded, refusal
from tests.common.loopback import logged

LIST = ServerReflectionRequest(list_services="")
FILE = ServerReflectionRequest(file_containing_symbol="framesieve.v1.EncoderService")
SMALL_WINDOW = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.http2.lookahead_bytes", 1000),
    ("grpc.http2.bdp_probe", 0),
]


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[GuardedService]:
    async with guarded(f"unix:{tmp_path}/s", Echo()) as service:
        yield service


@pytest.fixture
async def channel(service: GuardedService) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(service.address) as channel:
        yield channel


def reflect(channel: grpc.aio.Channel, requests: Iterable[ServerReflectionRequest] | None = None) -> Any:
    """With requests, ends once they are sent; without, stays open for those that are written."""
    return ServerReflectionStub(channel).ServerReflectionInfo(requests, timeout=TIMEOUT_S)


async def opened(channel: grpc.aio.Channel) -> Any:
    """A stream that was answered once and stays open."""
    call = reflect(channel)
    await call.write(LIST)
    assert isinstance(await call.read(), ServerReflectionResponse)
    return call


async def streams(service: GuardedService, count: int) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while service.reflection.streams != count:
            await asyncio.sleep(0.01)


def files(answer: ServerReflectionResponse) -> list[str]:
    return [FileDescriptorProto.FromString(each).name for each in answer.file_descriptor_response.file_descriptor_proto]


async def test_one_stream_is_told_the_services_their_files_and_what_there_is_not(channel: grpc.aio.Channel) -> None:
    asked = [
        LIST,
        FILE,
        ServerReflectionRequest(file_by_filename="framesieve/v1/prompt.proto"),
        ServerReflectionRequest(file_containing_symbol="framesieve.v1.Nothing"),
    ]
    listed, by_symbol, by_name, unknown = [answer async for answer in reflect(channel, asked)]
    assert [each.name for each in listed.list_services_response.service] == ["framesieve.v1.EncoderService"]
    assert files(by_symbol)[0] == "framesieve/v1/encoder.proto"
    assert files(by_name)[0] == "framesieve/v1/prompt.proto"
    assert unknown.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]


async def test_a_long_name_is_refused_and_its_stream_ends(service: GuardedService, channel: grpc.aio.Channel) -> None:
    call = await opened(channel)
    await call.write(ServerReflectionRequest(file_containing_symbol="a" * 2**20))
    code, _, told = await refusal(call.read())
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert f"one that asks for reflection may have {reflection.MAX_REQUEST_BYTES}" in told
    await streams(service, 0)


async def test_what_is_no_request_is_refused(channel: grpc.aio.Channel) -> None:
    raw = channel.stream_stream(f"/{reflection.NAME}/ServerReflectionInfo")
    code, _, told = await refusal(raw(iter([b"\xff" * 10]), timeout=TIMEOUT_S).read())
    assert (code, told) == (grpc.StatusCode.INVALID_ARGUMENT, "the request is no ServerReflectionRequest")


@pytest.mark.parametrize("limit", ["MAX_STREAMS", "MAX_STREAMS_PER_CLIENT"])
async def test_streams_are_counted_and_whoever_leaves_makes_room(
    service: GuardedService, channel: grpc.aio.Channel, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(reflection, limit, 3)
    calls = [await opened(channel) for _ in range(3)]
    assert (await refusal(reflect(channel).read()))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
    calls[0].cancel()
    await streams(service, 2)
    await opened(channel)


@pytest.mark.parametrize("how", ["cancelled", "disconnected"])
async def test_whoever_reads_nothing_and_leaves_is_no_error(
    service: GuardedService, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    async with grpc.aio.insecure_channel(service.address, SMALL_WINDOW) as own:
        unread = [reflect(own, [FILE] * 200) for _ in range(4)]
        await streams(service, 4)
        await asyncio.sleep(0.5)  # in which the window fills
        if how == "cancelled":
            for each in unread:
                each.cancel()
            await streams(service, 0)
    await streams(service, 0)
    await asyncio.sleep(0.1)
    assert logged(caplog) == []
