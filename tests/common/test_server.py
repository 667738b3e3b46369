"""What every service does around its own work: statuses for errors, health, reflection, drain on SIGTERM."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from socket import create_server
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status
from prometheus_client import REGISTRY

from common.channels import error_from_status, open_channel, upstream_errors
from common.contract import errors
from common.process import ExitStatus, free_port
from common.serving.server import serve
from common.serving.settings import ServiceSettings
from framesieve.v1 import encoder_pb2, encoder_pb2_grpc, tensor_pb2
from tests.common.loopback import TIMEOUT_S, eventually, logged

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
    9: errors.Unavailable("the tower has ended", "encoder"),
}
FLOOD = 100
UNAVAILABLE = ("framesieve_requests_total", {"method": "Encode", "code": "UNAVAILABLE"})
RUNNING = ("framesieve_requests_running", {"method": "Encode"})
MIB = bytes(2**20)
SMALL_WINDOW = [("grpc.http2.lookahead_bytes", 1000), ("grpc.http2.bdp_probe", 0)]
LEAVES = [errors.InvalidRequest, errors.MediaDamaged, errors.MediaForbidden, errors.Overloaded, errors.Unavailable]


class Peer(encoder_pb2_grpc.EncoderServiceServicer):
    """Fails as it is told to; 0 answers at once and again once `go_on` is set, FLOOD without end."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()

    async def Encode(
        self, requests: AsyncIterator[encoder_pb2.EncodeRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[encoder_pb2.EncodeResponse]:
        async for request in requests:
            index = request.select.media_index
            while index == FLOOD:
                yield encoder_pb2.EncodeResponse(embeds=encoder_pb2.EmbedsChunk(chunk=tensor_pb2.TensorChunk(data=MIB)))
            if index:
                raise FAILURES[index]
            for step in range(2):
                yield encoder_pb2.EncodeResponse(progress=encoder_pb2.MediaProgress(decoded_slices=step))
                await self.go_on.wait()


@asynccontextmanager
async def serving(
    folder: Path,
    drain_s: float = 5,
    well: Callable[[], bool] = lambda: True,
    peer: Peer | None = None,
    **other: Any,
) -> AsyncIterator[tuple[grpc.aio.Channel, asyncio.Task[ExitStatus]]]:
    settings = ServiceSettings(**{"listen": f"unix:{folder}/s", "metrics_port": 0, "drain_s": drain_s, **other})
    register = partial(encoder_pb2_grpc.add_EncoderServiceServicer_to_server, peer or Peer())
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    task = asyncio.create_task(serve(SERVICE, settings, register, well))
    try:
        async with open_channel(settings.listen) as channel:
            await asyncio.wait_for(channel.channel_ready(), 10)
            yield channel, task
    finally:
        if not task.done():
            os.kill(os.getpid(), signal.SIGTERM)
        try:
            await asyncio.wait_for(task, 10)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


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
    peer = Peer()
    async with serving(tmp_path, drain_s=60, peer=peer) as (channel, task):
        running = ask(channel, 0)
        assert (await running.read()).progress.decoded_slices == 0
        os.kill(os.getpid(), signal.SIGTERM)
        async with grpc.aio.insecure_channel(f"unix:{tmp_path}/s") as fresh:
            await becomes("NOT_SERVING", fresh)
            assert REGISTRY.get_sample_value("framesieve_serving") == 0
            with pytest.raises(errors.Unavailable, match=r"^encoder is draining$") as told, upstream_errors("a proxy"):
                await ask(fresh, 0).read()
            assert told.value.stage == "encoder"
        peer.go_on.set()
        assert (await running.read()).progress.decoded_slices == 1
        assert await running.read() is grpc.aio.EOF
        assert await asyncio.wait_for(task, 10) is ExitStatus.FINISHED


async def test_a_request_that_outlives_the_grace_is_told_so(tmp_path: Path) -> None:
    async with serving(tmp_path, drain_s=0.1) as (channel, task):
        running = ask(channel, 0)
        await running.read()
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(errors.Unavailable, match=r"^encoder is draining, .* is over$"), upstream_errors("a proxy"):
            await running.read()
        assert await asyncio.wait_for(task, 10) is ExitStatus.CUT_OFF


async def test_requests_in_the_midst_of_their_answers_are_told_so_as_well(tmp_path: Path) -> None:
    async with serving(tmp_path, drain_s=0.1) as (channel, task):
        busy = [ask(channel, FLOOD) for _ in range(8)]
        for call in busy:
            await call.read()
        reading = [asyncio.create_task(read_to_its_end(call)) for call in busy]
        os.kill(os.getpid(), signal.SIGTERM)
        for each in reading:
            with pytest.raises(errors.Unavailable, match="the time to finish is over"):
                await each
        assert await asyncio.wait_for(task, 10) is ExitStatus.CUT_OFF


async def read_to_its_end(call: Any) -> None:
    with upstream_errors("encoder"):
        while await call.read() is not grpc.aio.EOF:
            pass


async def test_a_caller_that_does_not_read_keeps_nobody_from_stopping(tmp_path: Path) -> None:
    async with serving(tmp_path, drain_s=0.1) as (channel, task):
        stuck = ask(channel, FLOOD)
        await stuck.read()
        await asyncio.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(task, 10) is ExitStatus.CUT_OFF


@pytest.mark.parametrize("how", ["cancelled", "disconnected", "past its deadline"])
async def test_who_leaves_without_reading_is_cancelled_like_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    # A deadline passes for the caller first, who cancels: that is heard before it passes here, or after.
    codes = ("CANCELLED", "DEADLINE_EXCEEDED") if how == "past its deadline" else ("CANCELLED",)
    before = sum(map(ended_with, codes))
    async with serving(tmp_path) as (own, _):
        async with grpc.aio.insecure_channel(f"unix:{tmp_path}/s", SMALL_WINDOW) as channel:
            timeout = 2 if how == "past its deadline" else None
            unread = [ask(channel, FLOOD, timeout=timeout) for _ in range(4)]
            await eventually(lambda: REGISTRY.get_sample_value(*RUNNING) == 4)
            await asyncio.sleep(0.5)  # in which the window fills
            if how == "cancelled":
                for each in unread:
                    each.cancel()
            if how == "past its deadline":
                await asyncio.wait([asyncio.create_task(each.code()) for each in unread])
        await eventually(lambda: REGISTRY.get_sample_value(*RUNNING) == 0)
        await asyncio.sleep(0.1)  # in which gRPC would log
        assert logged(caplog) == []
        assert sum(map(ended_with, codes)) == before + 4
        with refused():
            await ask(own, 1).read()


def ended_with(code: str) -> float:
    return REGISTRY.get_sample_value("framesieve_requests_total", {"method": "Encode", "code": code}) or 0


async def test_only_the_neighbour_of_what_is_gone_tries_again(tmp_path: Path) -> None:
    async with serving(tmp_path) as (channel, _):
        for index, attempts in ((5, 1), (9, 3)):
            before = REGISTRY.get_sample_value(*UNAVAILABLE) or 0
            with refused():
                await ask(channel, index).read()
            wanted = before + attempts  # each counted once its caller has heard
            await eventually(lambda wanted=wanted: REGISTRY.get_sample_value(*UNAVAILABLE) == wanted)  # type: ignore[misc]


async def test_health_says_what_the_service_says_of_itself(tmp_path: Path) -> None:
    well = [True]
    async with serving(tmp_path, well=lambda: well[0]), grpc.aio.insecure_channel(f"unix:{tmp_path}/s") as prober:
        for now, status in ((True, "SERVING"), (False, "NOT_SERVING"), (True, "SERVING")):
            well[0] = now
            await becomes(status, prober)
            assert REGISTRY.get_sample_value("framesieve_serving") == now


async def becomes(status: str, channel: grpc.aio.Channel) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while await status_of(channel) != health_pb2.HealthCheckResponse.ServingStatus.Value(status):
            await asyncio.sleep(0.02)


async def status_of(channel: grpc.aio.Channel) -> int:
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=SERVICE))
    return int(answer.status)


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


@pytest.mark.parametrize("socket", ["unix:{}/s", "unix-abstract:{}"])
async def test_beside_a_unix_socket_metrics_are_told_on_loopback_alone(tmp_path: Path, socket: str) -> None:
    port = free_port()
    async with serving(tmp_path, listen=socket.format(tmp_path), metrics_port=port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.close()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.2", port)  # of this machine, and where all addresses would answer


async def test_an_address_that_cannot_be_listened_on_refuses_to_start() -> None:
    blocked = ServiceSettings(listen="256.0.0.1:1", metrics_port=0)
    with pytest.raises(errors.StartupError, match=r"^cannot listen on --listen 256\.0\.0\.1:1: "):
        await serve(SERVICE, blocked, lambda s: None, lambda: True)


async def test_a_port_of_metrics_that_is_taken_refuses_to_start_by_its_name(tmp_path: Path) -> None:
    with create_server(("127.0.0.1", free_port())) as taken:
        port = taken.getsockname()[1]
        blocked = ServiceSettings(listen=f"unix:{tmp_path}/s", metrics_port=port)
        with pytest.raises(errors.StartupError, match=f"^cannot tell metrics on --metrics-port {port}: .*in use"):
            await serve(SERVICE, blocked, lambda s: None, lambda: True)
