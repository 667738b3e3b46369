"""What every service does besides its own work: statuses for errors, health, reflection, metrics, drain on SIGTERM."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from socket import create_server
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from prometheus_client import REGISTRY

from gridsieve.common.channels import error_from_status, open_channel, upstream_errors
from gridsieve.common.contract import errors
from gridsieve.common.process import ExitStatus, free_port
from gridsieve.common.serving.server import StepWatch, serve
from gridsieve.common.serving.settings import ServiceSettings
from gridsieve.v1 import encoder_pb2, encoder_pb2_grpc
from tests.common.guarded_service import SERVICE
from tests.common.loopback import TIMEOUT_S, eventually, logged

FAILURES: dict[int, Exception] = {
    3: errors.MediaForbidden("path /etc/passwd is outside --media-root"),
    4: errors.Overloaded("8 requests wait, at most 8 may", retry_after_s=2.5),
    5: errors.Unavailable("preprocessing is draining", "preprocessing"),
    6: errors.PeerContract("kept is not increasing at address 0xdeadbeef"),
    7: ZeroDivisionError("secret"),
    8: errors.MediaRejected(f"video.path {'ä' * 100_000!r} cannot be read"),
    9: errors.Unavailable("the tower has ended", "encoder"),
    10: errors.InvalidRequest(field="sampling.top_p", limit="above 0", value=-1, remedy="set `sampling.top_p` to 1"),
    11: errors.MediaRejected("ä" * 5000, field="ä" * 200, value="ä" * 500, limit="ä" * 500, remedy="ä" * 500),
    12: errors.MediaRejected(field="video.url", limit="a path below --media-root", value="/\udcff\0"),
}
FLOOD = 100
RUNNING = ("gridsieve_requests_running", {"method": "Encode"})
SMALL_WINDOW = [("grpc.http2.lookahead_bytes", 1000), ("grpc.http2.bdp_probe", 0)]


class Peer(encoder_pb2_grpc.EncoderServiceServicer):
    """Selecting an index of FAILURES fails; 0 answers at once and again after `go_on`, FLOOD without end."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()

    async def Encode(
        self, requests: AsyncIterator[encoder_pb2.EncodeRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[encoder_pb2.EncodeResponse]:
        async for request in requests:
            index = request.select.media_index
            while index == FLOOD:
                yield encoder_pb2.EncodeResponse(embeds={"chunk": {"data": bytes(2**20)}})
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
    broken: asyncio.Event | None = None,
    step: StepWatch | None = None,
    **other: Any,
) -> AsyncIterator[tuple[grpc.aio.Channel, asyncio.Task[ExitStatus]]]:
    settings = ServiceSettings(**{"listen": f"unix:{folder}/s", "metrics_port": 0, "drain_s": drain_s, **other})
    register = partial(encoder_pb2_grpc.add_EncoderServiceServicer_to_server, peer or Peer())
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    task = asyncio.create_task(serve(SERVICE, settings, register, well, broken, step=step))
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


async def test_errors_become_statuses_and_errors_again(tmp_path: Path) -> None:
    async with serving(tmp_path) as (channel, _):
        for index, error in FAILURES.items():
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ask(channel, index, metadata=(("x-request-id", "mine-7"),)).read()
            back = error_from_status(caught.value, "encoder")
            if isinstance(error, errors.PeerContract | ZeroDivisionError):  # the caller gets no details
                expected = type(error) if isinstance(error, errors.PeerContract) else errors.GridsieveError
                assert (caught.value.code(), type(back)) == (grpc.StatusCode.INTERNAL, expected)
                assert "mine-7" in str(back)
                assert str(error) not in str(back)
            else:
                assert isinstance(error, errors.GridsieveError)
                assert (caught.value.code(), type(back)) == (grpc.StatusCode[error.status], type(error))
                as_sent = caught.value.details().removesuffix(" …")
                text = f"{'ä' * 128} {'ä' * 5000}" if index == 11 else str(error).replace("\udcff", "\\udcff")
                assert text.startswith(as_sent), "as much of the text as a status holds"
                assert str(back).startswith(as_sent)
                assert len(str(back)) >= min(len(str(error)), 700)
                for name in ("field", "value", "limit", "remedy"):
                    told = getattr(error, name)
                    assert getattr(back, name) == (
                        told and told.replace("\udcff", "\\udcff")[: 128 if index == 11 else 200]
                    )
                assert getattr(back, "retry_after_s", None) == {4: 2.5}.get(index)
                assert getattr(back, "stage", None) == {5: "preprocessing", 9: "encoder"}.get(index)


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_describes_every_service_that_it_lists(tmp_path: Path, version: str) -> None:
    async with serving(tmp_path) as (channel, _):

        async def ask(**wanted: Any) -> reflection_pb2.ServerReflectionResponse:  # the messages of v1 are the same
            call = channel.stream_stream(f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo")()
            await call.write(reflection_pb2.ServerReflectionRequest(**wanted).SerializeToString())
            return reflection_pb2.ServerReflectionResponse.FromString(await call.read())

        listed = [each.name for each in (await ask(list_services="")).list_services_response.service]
        reflecting = [f"grpc.reflection.{each}.ServerReflection" for each in ("v1", "v1alpha")]
        assert sorted(listed) == sorted([SERVICE, "grpc.health.v1.Health", *reflecting])
        for name in listed:
            answer = await ask(file_containing_symbol=name)
            described = [*map(FileDescriptorProto.FromString, answer.file_descriptor_response.file_descriptor_proto)]
            assert name in [f"{each.package}.{service.name}" for each in described for service in each.service]


async def test_sigterm_lets_running_requests_finish_and_refuses_new_ones(tmp_path: Path) -> None:
    peer = Peer()
    async with serving(tmp_path, drain_s=60, peer=peer) as (channel, task):
        running = ask(channel, 0)
        assert (await running.read()).progress.decoded_slices == 0
        os.kill(os.getpid(), signal.SIGTERM)
        async with grpc.aio.insecure_channel(f"unix:{tmp_path}/s") as fresh:
            await becomes("NOT_SERVING", fresh)
            assert REGISTRY.get_sample_value("gridsieve_serving") == 0
            with (
                pytest.raises(errors.Unavailable, match=r"^encoder is draining$") as caught,
                upstream_errors("a proxy"),
            ):
                await ask(fresh, 0).read()
            assert caught.value.stage == "encoder"
        peer.go_on.set()
        assert (await running.read()).progress.decoded_slices == 1
        assert await running.read() is grpc.aio.EOF
        assert await asyncio.wait_for(task, 10) is ExitStatus.FINISHED


async def test_requests_that_outlast_the_grace_period_end_with_unavailable_even_if_one_caller_does_not_read(
    tmp_path: Path,
) -> None:
    async def read_to_its_end(call: Any) -> None:
        with upstream_errors("encoder"):
            while await call.read() is not grpc.aio.EOF:
                pass

    async with serving(tmp_path, drain_s=0.1) as (channel, task):
        stuck, waiting, *busy = ask(channel, FLOOD), ask(channel, 0), *(ask(channel, FLOOD) for _ in range(8))
        for call in (stuck, waiting, *busy):
            await call.read()
        reading = [asyncio.create_task(read_to_its_end(call)) for call in (waiting, *busy)]
        os.kill(os.getpid(), signal.SIGTERM)
        for each in reading:
            with pytest.raises(errors.Unavailable, match=r"^encoder is draining, and its grace period is over$"):
                await each
        assert await asyncio.wait_for(task, 10) is ExitStatus.CUT_OFF


async def test_a_caller_that_leaves_unread_responses_is_cancelled_without_a_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = ended_with("CANCELLED")
    async with serving(tmp_path):
        async with grpc.aio.insecure_channel(f"unix:{tmp_path}/s", SMALL_WINDOW) as channel:
            unread = [ask(channel, FLOOD) for _ in range(4)]
            await eventually(lambda: REGISTRY.get_sample_value(*RUNNING) == len(unread))
            await asyncio.sleep(0.5)  # until the window is full
        await eventually(lambda: REGISTRY.get_sample_value(*RUNNING) == 0)
        await asyncio.sleep(0.1)  # time for gRPC to log
        assert logged(caplog) == []
        assert ended_with("CANCELLED") == before + len(unread)


def ended_with(code: str) -> float:
    return REGISTRY.get_sample_value("gridsieve_requests_total", {"method": "Encode", "code": code}) or 0


async def test_only_the_caller_of_a_lost_service_retries(tmp_path: Path) -> None:
    async with serving(tmp_path) as (channel, _):
        for index, attempts in ((5, 1), (9, 3)):
            wanted = ended_with("UNAVAILABLE") + attempts
            with pytest.raises(grpc.aio.AioRpcError):
                await ask(channel, index).read()
            # Counted after the caller got its status.
            await eventually(lambda wanted=wanted: ended_with("UNAVAILABLE") == wanted)  # type: ignore[misc]


async def test_health_and_its_metric_follow_the_service(tmp_path: Path) -> None:
    well = [True]
    async with serving(tmp_path, well=lambda: well[0]), grpc.aio.insecure_channel(f"unix:{tmp_path}/s") as prober:
        for now, status in ((True, "SERVING"), (False, "NOT_SERVING"), (True, "SERVING")):
            well[0] = now
            await becomes(status, prober)
            assert REGISTRY.get_sample_value("gridsieve_serving") == now


async def test_a_service_that_can_never_work_again_ends_with_failed(tmp_path: Path) -> None:
    """When it is: generation/test_engine.py, encoder/test_batcher.py; whole: integration/test_encoder_ranks.py."""
    broken = asyncio.Event()
    async with serving(tmp_path, broken=broken) as (_, task):
        broken.set()
        assert await asyncio.wait_for(task, 10) is ExitStatus.FAILED


async def test_a_late_step_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    monkeypatch.setattr("gridsieve.common.serving.server.os._exit", ended.set_result)
    since: list[int | None] = [None]
    step = StepWatch(lambda: since[0], timeout_s=60)
    async with serving(tmp_path, step=step), grpc.aio.insecure_channel(f"unix:{tmp_path}/s") as prober:
        since[0] = time.monotonic_ns() - 50 * 10**9
        await becomes("SERVING", prober)
        since[0] = time.monotonic_ns() - 61 * 10**9
        await becomes("NOT_SERVING", prober)
        assert await asyncio.wait_for(ended, TIMEOUT_S) == ExitStatus.STUCK
        since[0] = None


def test_only_a_gpu_has_a_limit_of_steps_unless_it_is_set() -> None:
    began_ns = time.monotonic_ns() - 301 * 10**9
    for timeout_s, device, late in ((None, "cuda", True), (None, "cpu", False), (300.0, "cpu", True)):
        assert StepWatch.of(lambda: began_ns, timeout_s, device).late == late


async def becomes(status: str, channel: grpc.aio.Channel) -> None:
    wanted = health_pb2.HealthCheckResponse.ServingStatus.Value(status)
    health = health_pb2_grpc.HealthStub(channel)
    async with asyncio.timeout(TIMEOUT_S):
        while (await health.Check(health_pb2.HealthCheckRequest(service=SERVICE))).status != wanted:
            await asyncio.sleep(0.02)


async def test_a_service_on_a_unix_socket_serves_metrics_on_loopback_only(tmp_path: Path) -> None:
    port = free_port()
    async with serving(tmp_path, metrics_port=port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.close()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.2", port)  # another address of this machine


async def test_a_port_that_is_taken_while_a_service_loads_its_model_ends_it(tmp_path: Path) -> None:
    with create_server(("127.0.0.1", free_port())) as taken:
        port = taken.getsockname()[1]
        for listen, metrics_port, why in (
            ("256.0.0.1:1", 0, r"cannot listen on --listen 256\.0\.0\.1:1: "),
            (f"unix:{tmp_path}/s", port, f"cannot serve metrics on --metrics-port {port}: .*in use"),
        ):
            settings = ServiceSettings(listen=listen, metrics_port=metrics_port)
            with pytest.raises(errors.StartupError, match=why):
                await serve(SERVICE, settings, lambda _: None, lambda: True)
