"""Serves one gRPC service until it is told to stop, with health, reflection and metrics beside it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

import grpc
import structlog

from common.contract.errors import StartupError
from common.process import ExitStatus, allow_open_files, at_once, keep_freed_memory
from common.security.credentials import is_unix
from common.security.quotas import ClientBudgets
from common.serving.exposition import serve_metrics
from common.serving.guards import guarded_server, listen, metrics_tls
from common.serving.health import NAME as HEALTH
from common.serving.health import Health
from common.serving.interceptors import RequestInterceptor, stage_of
from common.serving.reflection import NAME as REFLECTION
from common.serving.reflection import Reflection
from common.serving.settings import ServiceSettings
from common.telemetry.metrics import SERVING
from common.telemetry.tracing import open_tracer

_LINGER_S = 0.25
_HEALTH_S = 0.5
_SIGNALS = (signal.SIGTERM, signal.SIGINT)

log = structlog.get_logger()


def run(main: Callable[[], Coroutine[Any, Any, ExitStatus]]) -> NoReturn:
    """Runs a service's main coroutine and ends the process with what it returns; a StartupError is its last line.

    Until `serve` takes signals for requests to drain, and once it does, a signal ends the process at once.
    """
    keep_freed_memory()
    allow_open_files()
    _end_on_signals()
    try:
        status = asyncio.run(main())
    except StartupError as error:
        if structlog.is_configured():
            log.error("cannot start", error=str(error))
        else:  # by its settings, which say how to log
            print(f"cannot start: {error}", file=sys.stderr)
        status = ExitStatus.CANNOT_START
    sys.exit(status)


async def serve(
    service: str,
    settings: ServiceSettings,
    register: Callable[[grpc.aio.Server], None],
    well: Callable[[], bool],
    broken: asyncio.Event | None = None,
) -> ExitStatus:
    """Serves until SIGTERM or SIGINT, then drains: health says NOT_SERVING, running requests finish within the grace.

    service: the full gRPC name, framesieve.v1.….
    register: adds the servicer to the server.
    well: whether the service can do its work; health says so, however many requests it still answers.
    broken: set where it never can again: it drains as if told to stop.
    Returns FAILED if it was broken, CUT_OFF if requests outlasted the grace. Raises StartupError if the address, or the
    port of metrics, cannot be listened on as the settings say.
    """
    for old, new in settings.old_names:
        log.warning("a setting was renamed, its old name goes with the next release", old=old, new=new)
    tracer = open_tracer(stage_of(service))
    budgets = ClientBudgets(settings.max_requests_per_client, settings.max_bytes_per_client)
    requests = RequestInterceptor(budgets, tracer)
    server = guarded_server(settings, requests)
    register(server)
    health = Health(("", service, HEALTH))
    health.add_to(server)
    if settings.reflection:
        Reflection((service, HEALTH, REFLECTION)).add_to(server)
    try:
        tls = listen(server, settings)
    except (RuntimeError, OSError) as error:
        raise StartupError(f"cannot listen on --listen {settings.listen}: {error}") from error
    try:
        serve_metrics(settings.metrics_port, _metrics_host(settings.listen), metrics_tls(settings))
    except OSError as error:
        raise StartupError(f"cannot tell metrics on --metrics-port {settings.metrics_port}: {error}") from error

    stopping = _first_signal()
    await server.start()
    log.info(
        "serving",
        listen=settings.listen,
        tls=tls,
        tokens=settings.auth_tokens_file is not None,
        metrics_port=settings.metrics_port,
        model=str(settings.model),
    )
    telling = asyncio.create_task(_tell_health(health, well))
    await _either(stopping, broken or asyncio.Event())
    log.info("draining", grace_s=settings.drain_s)
    telling.cancel()
    SERVING.set(0)
    health.tell(False)  # waits for nobody, so that no request comes between this and the next line
    cut_off = await requests.drain(settings.drain_s)
    # A client that still writes (flow control does) into a closed connection loses what it has not read from it.
    await asyncio.sleep(_LINGER_S)
    # With some grace, so that channels are told to go elsewhere; without, they log an error.
    await server.stop(_LINGER_S)
    if tracer is not None:
        tracer.close()
    log.info("stopped", cut_off=cut_off)
    if broken is not None and broken.is_set():
        return ExitStatus.FAILED
    return ExitStatus.CUT_OFF if cut_off else ExitStatus.FINISHED


async def _either(one: asyncio.Event, other: asyncio.Event) -> None:
    """Returns once one of them is set."""
    waits = [asyncio.create_task(event.wait()) for event in (one, other)]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in waits:
            each.cancel()


async def _tell_health(health: Health, well: Callable[[], bool]) -> None:
    """Has health say what `well` says, and the log whenever that changes."""
    told: bool | None = None
    while True:
        if (now := well()) != told:
            if told is not None:
                log.log(logging.INFO if now else logging.ERROR, "healthy" if now else "unhealthy")
            SERVING.set(now)
            health.tell(now)
            told = now
        await asyncio.sleep(_HEALTH_S)


def _first_signal() -> asyncio.Event:
    """Set by the first SIGTERM or SIGINT; the second ends the process at once, though the loop may stand still."""
    signalled = asyncio.Event()
    loop = asyncio.get_running_loop()

    def note(*_: object) -> None:
        _end_on_signals()
        loop.call_soon_threadsafe(signalled.set)

    for number in _SIGNALS:
        signal.signal(number, note)
    return signalled


def _end_on_signals() -> None:
    """Not left to the system, which spares the first process of a container."""
    for number in _SIGNALS:
        signal.signal(number, lambda received, _: os._exit(at_once(received)))


def _metrics_host(listen: str) -> str:
    """Metrics are served where the service is; beside a unix socket, on loopback alone."""
    return "127.0.0.1" if is_unix(listen) else listen.rpartition(":")[0].strip("[]")
