"""Health is open to everybody: clients that do not read, send long requests or watch often block nothing."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gridsieve.common.channels import open_channel
from gridsieve.common.process import ExitStatus
from gridsieve.common.serving import health
from tests.common.guarded_service import Echo, ask, guarded, refusal
from tests.common.loopback import TIMEOUT_S, eventually
from tests.http2 import DATA, END_HEADERS, END_STREAM, HEADERS, NO_WINDOW, PREFACE, SETTINGS, frame, headers

SERVICE = """
from gridsieve.common.process import ExitStatus
from gridsieve.common.serving.server import run, serve
from gridsieve.common.serving.settings import ServiceSettings
from gridsieve.v1 import encoder_pb2_grpc
from tests.common.guarded_service import SERVICE, Echo

async def main() -> ExitStatus:
    settings = ServiceSettings(listen={listen!r}, metrics_port=0, drain_s=1)
    add = encoder_pb2_grpc.add_EncoderServiceServicer_to_server
    return await serve(SERVICE, settings, lambda server: add(Echo(), server), lambda: True)

run(main)
"""


async def watch_without_reading(path: Path) -> asyncio.StreamWriter:
    """A Watch call with a flow-control window of 0: nothing can ever be sent to it."""
    _, writer = await asyncio.open_unix_connection(path)
    writer.write(PREFACE + frame(SETTINGS, 0, 0, NO_WINDOW))
    writer.write(frame(HEADERS, END_HEADERS, 1, headers("/grpc.health.v1.Health/Watch")))
    writer.write(frame(DATA, END_STREAM, 1, bytes(5)))
    await writer.drain()
    return writer


def watch(channel: grpc.aio.Channel, name: str = "") -> grpc.aio.UnaryStreamCall:
    return health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=name), timeout=TIMEOUT_S)


async def test_a_watcher_that_does_not_read_blocks_neither_other_watchers_nor_the_drain(tmp_path: Path) -> None:
    path = tmp_path / "s"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", SERVICE.format(listen=f"unix:{path}"))
    try:
        async with open_channel(f"unix:{path}") as channel, grpc.aio.insecure_channel(f"unix:{path}") as prober:
            await asyncio.wait_for(channel.channel_ready(), TIMEOUT_S)
            stranger = await watch_without_reading(path)
            watched = watch(prober)
            assert (await watched.read()).status == health_pb2.HealthCheckResponse.SERVING
            assert await ask(channel, 7) == 7
            process.send_signal(signal.SIGTERM)
            assert (await watched.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await asyncio.wait_for(process.wait(), TIMEOUT_S) == ExitStatus.FINISHED
        stranger.close()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_unknown_names_get_their_own_status_and_long_ones_are_refused(tmp_path: Path) -> None:
    async with (
        guarded(f"unix:{tmp_path}/s", Echo()) as service,
        grpc.aio.insecure_channel(service.address) as channel,
    ):
        unknown = watch(channel, "unknown")
        assert (await unknown.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        code, _, message = await refusal(watch(channel, "a" * 2**20).read())
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert f"one that asks for health may have {health.MAX_REQUEST_BYTES}" in message
        check = health_pb2_grpc.HealthStub(channel).Check
        for name, status in (("unknown", grpc.StatusCode.NOT_FOUND), ("a" * 257, grpc.StatusCode.INVALID_ARGUMENT)):
            assert (await refusal(check(health_pb2.HealthCheckRequest(service=name))))[0] is status
        assert service.health.watchers == 1


@pytest.mark.parametrize("limit", ["MAX_WATCHERS", "MAX_WATCHERS_PER_CLIENT"])
async def test_the_number_of_watchers_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(health, limit, 3)
    async with (
        guarded(f"unix:{tmp_path}/s", Echo()) as service,
        grpc.aio.insecure_channel(service.address) as channel,
    ):
        calls = [watch(channel) for _ in range(3)]
        for each in calls:
            await each.read()
        assert (await refusal(watch(channel).read()))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        calls[0].cancel()
        await eventually(lambda: service.health.watchers == 2)
        assert (await watch(channel).read()).status == health_pb2.HealthCheckResponse.SERVING
