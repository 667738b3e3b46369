"""What every service does around its own work: statuses for errors, health, reflection, drain on SIGTERM."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from common import errors
from common.channels import error_from_status, open_channel, upstream_errors
from common.server import serve
from common.settings import ServiceSettings
from framesieve.v1 import encoder_pb2, encoder_pb2_grpc

SERVICE = "framesieve.v1.EncoderService"
FAILURES: dict[int, Exception] = {
    1: errors.InvalidRequest("fps must be above 0, got -1"),
    2: errors.MediaDamaged("9 of 10 frames cannot be decoded"),
    3: errors.MediaForbidden("path /etc/passwd is outside --media-root"),
    4: errors.Overloaded("8 requests wait, at most 8 may", retry_after_s=2.5),
    5: errors.Unavailable("preprocessing is draining", "preprocessing"),
    6: errors.PeerContract("kept is not increasing at address 0xdeadbeef"),
    7: ZeroDivisionError("secret"),
    8: errors.MediaRejected(f"video.path {'ä' * 100_000!r} cannot be read"),
}
LEAVES = [errors.InvalidRequest, errors.MediaDamaged, errors.MediaForbidden, errors.Overloaded, errors.Unavailable]


class Peer(encoder_pb2_grpc.EncoderServiceServicer):
    """Fails as it is told to; 0 answers twice, half a second apart."""

    async def Encode(
        self, requests: AsyncIterator[encoder_pb2.EncodeRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[encoder_pb2.EncodeResponse]:
        async for request in requests:
            index = request.select.media_index
            if index:
                raise FAILURES[index]
            for step in range(2):
                yield encoder_pb2.EncodeResponse(progress=encoder_pb2.MediaProgress(decoded_slices=step))
                await asyncio.sleep(0.5)


@asynccontextmanager
async def serving(folder: Path, drain_s: float = 5) -> AsyncIterator[tuple[grpc.aio.Channel, asyncio.Task[None]]]:
    settings = ServiceSettings(listen=f"unix:{folder}/s", metrics_port=0, drain_s=drain_s)
    task = asyncio.create_task(
        serve(SERVICE, settings, lambda s: encoder_pb2_grpc.add_EncoderServiceServicer_to_server(Peer(), s))
    )
    async with open_channel(settings.listen) as channel:
        await asyncio.wait_for(channel.channel_ready(), 10)
        yield channel, task
    if not task.done():
        os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(task, 10)


def ask(channel: grpc.aio.Channel, index: int, **call: Any) -> Any:
    request = encoder_pb2.EncodeRequest()
    request.select.media_index = index
    return encoder_pb2_grpc.EncoderServiceStub(channel).Encode(iter([request]), **call)


@contextmanager
def refused() -> Iterator[list[grpc.aio.AioRpcError]]:
    caught: list[grpc.aio.AioRpcError] = []
    with pytest.raises(grpc.aio.AioRpcError) as info:
        yield caught
    caught.append(info.value)


async def test_every_leaf_of_the_tree_becomes_its_status_and_comes_back_as_itself(tmp_path: Path) -> None:
    async with serving(tmp_path) as (channel, _):
        for index, leaf in enumerate(LEAVES, start=1):
            with refused() as caught:
                await ask(channel, index).read()
            assert caught[0].code() is grpc.StatusCode[leaf.status]
            back = error_from_status(caught[0], "encoder")
            assert type(back) is leaf
            assert str(back) == str(FAILURES[index])
        assert isinstance(back, errors.Unavailable)
        assert back.stage == "preprocessing"


async def test_an_error_that_quotes_a_very_long_value_keeps_its_status(tmp_path: Path) -> None:
    async with serving(tmp_path) as (channel, _):
        with refused() as caught:
            await ask(channel, 8).read()
        assert caught[0].code() is grpc.StatusCode.INVALID_ARGUMENT
        back = error_from_status(caught[0], "encoder")
        assert type(back) is errors.MediaRejected
        assert str(back).startswith("video.path 'äää")


async def test_an_overload_carries_its_retry_hint(tmp_path: Path) -> None:
    async with serving(tmp_path) as (channel, _):
        with refused() as caught:
            await ask(channel, 4).read()
        back = error_from_status(caught[0], "encoder")
        assert isinstance(back, errors.Overloaded)
        assert back.retry_after_s == 2.5


async def test_bugs_and_broken_contracts_tell_the_caller_a_request_id_and_no_detail(tmp_path: Path) -> None:
    async with serving(tmp_path) as (channel, _):
        for index, reason in ((6, "PEER_CONTRACT"), (7, "INTERNAL")):
            with refused() as caught:
                await ask(channel, index, metadata=(("x-request-id", "mine-7"),)).read()
            assert caught[0].code() is grpc.StatusCode.INTERNAL
            assert "mine-7" in (caught[0].details() or "")
            assert "0xdeadbeef" not in str(caught[0].details())
            assert "secret" not in str(caught[0].details())
            status = rpc_status.from_call(caught[0])
            assert status is not None
            info = error_details_pb2.ErrorInfo()
            assert status.details[0].Unpack(info)
            assert info.reason == reason


async def test_sigterm_lets_running_requests_finish_and_refuses_new_ones(tmp_path: Path) -> None:
    async with serving(tmp_path) as (channel, task):
        running = ask(channel, 0)
        assert (await running.read()).progress.decoded_slices == 0
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.1)
        with pytest.raises(errors.Unavailable, match="encoder"), upstream_errors("encoder"):
            async with open_channel(f"unix:{tmp_path}/s") as fresh:
                await ask(fresh, 0).read()
        assert (await running.read()).progress.decoded_slices == 1
        assert await running.read() is grpc.aio.EOF
        await asyncio.wait_for(task, 10)


async def test_a_request_that_outlives_the_grace_is_ended(tmp_path: Path) -> None:
    async with serving(tmp_path, drain_s=0.1) as (channel, _):
        running = ask(channel, 0)
        await running.read()
        os.kill(os.getpid(), signal.SIGTERM)
        with refused():
            await running.read()


async def test_health_and_reflection_answer(tmp_path: Path) -> None:
    async with serving(tmp_path) as (channel, _):
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", SERVICE):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        listed = [each.name for each in (await call.read()).list_services_response.service]
        assert SERVICE in listed
        assert "grpc.health.v1.Health" in listed


async def test_an_address_that_cannot_be_listened_on_refuses_to_start() -> None:
    blocked = ServiceSettings(listen="256.0.0.1:1", metrics_port=0)
    with pytest.raises(errors.StartupError, match=r"256\.0\.0\.1"):
        await serve(SERVICE, blocked, lambda s: None)
