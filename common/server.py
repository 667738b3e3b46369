"""Serves one gRPC service until it is told to stop, with health, reflection and metrics beside it."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from common.channels import MAX_RECEIVE_BYTES
from common.errors import StartupError
from common.interceptors import RequestInterceptor
from common.malloc import keep_freed_memory
from common.settings import ServiceSettings
from common.telemetry import serve_metrics

_LINGER_S = 0.25

log = structlog.get_logger()


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs a service's main coroutine; a StartupError is printed and ends the process with status 2."""
    keep_freed_memory()
    try:
        asyncio.run(main())
    except StartupError as error:
        print(f"cannot start: {error}", file=sys.stderr)
        sys.exit(2)


async def serve(service: str, settings: ServiceSettings, register: Callable[[grpc.aio.Server], None]) -> None:
    """Serves until SIGTERM or SIGINT, then drains: health says NOT_SERVING, running requests finish within the grace.

    service: the full gRPC name, framesieve.v1.….
    register: adds the servicer to the server.
    Raises StartupError if the address cannot be listened on.
    """
    requests = RequestInterceptor()
    server = grpc.aio.server(
        interceptors=[requests],
        options=[
            ("grpc.max_receive_message_length", MAX_RECEIVE_BYTES),
            ("grpc.so_reuseport", 0),
            ("grpc.keepalive_time_ms", 60_000),
            ("grpc.http2.min_ping_interval_without_data_ms", 30_000),
        ],
    )
    register(server)
    health = health_aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    names = ("", service, "grpc.health.v1.Health")
    reflection.enable_server_reflection((*names[1:], reflection.SERVICE_NAME), server)
    try:
        server.add_insecure_port(settings.listen)
        serve_metrics(settings.metrics_port, _metrics_host(settings.listen))
    except (RuntimeError, OSError) as error:
        raise StartupError(
            f"cannot listen on --listen {settings.listen} and --metrics-port {settings.metrics_port}: {error}"
        ) from error

    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    await server.start()
    for name in names:
        await health.set(name, health_pb2.HealthCheckResponse.SERVING)
    log.info("serving", listen=settings.listen, metrics_port=settings.metrics_port, model=str(settings.model))
    await stopping.wait()
    log.info("draining", grace_s=settings.drain_s)
    await health.enter_graceful_shutdown()
    await requests.drain(settings.drain_s)
    # A client that still writes (flow control does) into a closed connection loses what it has not read from it.
    await asyncio.sleep(_LINGER_S)
    await server.stop(0)
    log.info("stopped")


def _metrics_host(listen: str) -> str:
    """Metrics are served where the service is; beside a unix socket, on loopback alone."""
    return "127.0.0.1" if listen.startswith("unix:") else listen.rpartition(":")[0].strip("[]")
