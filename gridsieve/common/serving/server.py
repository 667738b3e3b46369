"""Runs one gRPC service with health, reflection and metrics, until a signal stops it."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from time import monotonic_ns
from typing import Any, NoReturn

import grpc
import structlog

from gridsieve.common.contract.errors import StartupError
from gridsieve.common.process import (
    LAUNCHER,
    ExitStatus,
    allow_open_files,
    at_once,
    keep_freed_memory,
    when_parent_ends,
)
from gridsieve.common.security.quotas import ClientQuotas
from gridsieve.common.serving.guards import guarded_server, listen, serve_metrics
from gridsieve.common.serving.health import NAME as HEALTH
from gridsieve.common.serving.health import Health
from gridsieve.common.serving.interceptors import stage_of
from gridsieve.common.serving.reflection import enable_reflection
from gridsieve.common.serving.settings import ServiceSettings
from gridsieve.common.telemetry.metrics import SERVING
from gridsieve.common.telemetry.otlp import export_spans

_LINGER_S = 0.25
_HEALTH_S = 0.5
GPU_STEP_TIMEOUT_S = 300.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)

log = structlog.get_logger()


def run(main: Callable[[], Coroutine[Any, Any, ExitStatus]]) -> NoReturn:
    """Runs a service's main coroutine and exits with its status. A StartupError is the last line of its output.

    Before `serve` handles signals, and after the first signal, SIGTERM and SIGINT end the process at once. The end of
    the launcher that started it, if one did, is a SIGTERM.
    """
    keep_freed_memory()
    allow_open_files()
    _end_on_signals()
    if launcher := os.environ.pop(LAUNCHER, ""):
        when_parent_ends(int(launcher), partial(os.kill, os.getpid(), signal.SIGTERM))
    try:
        status = asyncio.run(main())
    except StartupError as error:
        if structlog.is_configured():
            log.error("cannot start", error=str(error))
        else:  # raised by the settings, which configure logging
            print(f"cannot start: {error}", file=sys.stderr)
        status = ExitStatus.CANNOT_START
    sys.exit(status)


@dataclass(frozen=True, slots=True)
class StepWatch:
    """since_ns: when the step that runs now began, on the monotonic clock; None between steps."""

    since_ns: Callable[[], int | None]
    timeout_s: float

    @classmethod
    def of(cls, since_ns: Callable[[], int | None], timeout_s: float | None, device: str) -> StepWatch:
        """timeout_s: --step-timeout-s; None: GPU_STEP_TIMEOUT_S on a GPU, and no limit on a CPU, which may be slow but
        does not hang. device: its type."""
        return cls(since_ns, timeout_s or (math.inf if device == "cpu" else GPU_STEP_TIMEOUT_S))

    @property
    def late(self) -> bool:
        since_ns = self.since_ns()
        return since_ns is not None and monotonic_ns() - since_ns > self.timeout_s * 10**9


async def serve(
    service: str,
    settings: ServiceSettings,
    register: Callable[[grpc.aio.Server], None],
    well: Callable[[], bool],
    broken: asyncio.Event | None = None,
    details: Mapping[str, str] | None = None,
    step: StepWatch | None = None,
    reaches: Callable[[], bool] = lambda: True,
    counts_callers: bool = False,
) -> ExitStatus:
    """Serves until SIGTERM or SIGINT, then drains: health reports NOT_SERVING and running requests may finish.

    service: the full gRPC name, gridsieve.v1.….
    register: adds the servicer to the server.
    well: whether the service can work; health reports it.
    broken: set when the service can never work again; it then drains as after a signal.
    details: what health says beside the status, as metadata of its answers.
    step: a step that takes too long ends the process, since nothing ends a thread that waits for a device.
    reaches: whether the services that it calls can be reached; health reports it under the name READY.
    counts_callers: whether its methods count tokens, which then have series for each caller.
    Returns FAILED if it was broken, CUT_OFF if requests outlasted --drain-s, else FINISHED. Raises StartupError where
    it cannot listen on its address or its metrics port.
    """
    close_spans = export_spans(stage_of(service))
    quotas = ClientQuotas(settings.max_requests_per_client, settings.max_bytes_per_client, settings.max_requests)
    server, requests = guarded_server(settings, quotas, stage_of(service), counts_callers)
    register(server)
    health = Health(("", service, HEALTH), details or {})
    health.add_to(server)
    if settings.reflection:
        enable_reflection((service, HEALTH), server)
    tls = listen(server, settings)
    serve_metrics(settings)

    stopping = first_signal()
    await server.start()
    log.info(
        "serving",
        listen=settings.listen,
        tls=tls,
        tokens=settings.auth_tokens_file is not None,
        metrics_port=settings.metrics_port,
        model=str(settings.model),
    )
    reporting = asyncio.create_task(_report_health(health, well, reaches))
    watching = asyncio.create_task(_end_on_late_steps(health, step)) if step else None
    ends = [asyncio.create_task(event.wait()) for event in (stopping, broken or asyncio.Event())]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    log.info("draining", grace_s=settings.drain_s)
    reporting.cancel()
    SERVING.set(0)
    health.set_serving(False)  # it does not wait, so no request can start before the next line refuses new ones
    cut_off = await requests.drain(settings.drain_s)
    # A client that still writes into a closed connection (flow control does) loses what it has not read yet.
    await asyncio.sleep(_LINGER_S)
    # With a grace period gRPC sends GOAWAY, so that channels switch to other replicas; without one they log an error.
    await server.stop(_LINGER_S)
    if watching:  # also while it drains
        watching.cancel()
    close_spans()
    log.info("stopped", cut_off=cut_off)
    if broken is not None and broken.is_set():
        return ExitStatus.FAILED
    return ExitStatus.CUT_OFF if cut_off else ExitStatus.FINISHED


async def _report_health(health: Health, well: Callable[[], bool], reaches: Callable[[], bool]) -> None:
    """Polls `well` and `reaches`, updates health and the metric, and logs each change."""
    before: bool | None = None
    was_ready = True
    while True:
        if (now := well()) != before:
            if before is not None:
                log.log(logging.INFO if now else logging.ERROR, "healthy" if now else "unhealthy")
            SERVING.set(now)
            before = now
        if (ready := reaches()) != was_ready:
            log.info(
                "ready" if ready else "not ready: a service that this one calls cannot be reached, or is not ready"
            )
            was_ready = ready
        health.set_serving(now, ready)
        await asyncio.sleep(_HEALTH_S)


async def _end_on_late_steps(health: Health, step: StepWatch) -> None:
    """Ends the process once a step is late."""
    while not step.late:
        await asyncio.sleep(_HEALTH_S)
    SERVING.set(0)
    health.set_serving(False)
    log.error("a step takes longer than --step-timeout-s, and the process ends", timeout_s=step.timeout_s)
    await asyncio.sleep(_LINGER_S)  # until watchers of health have heard of it
    os._exit(ExitStatus.STUCK)


def first_signal() -> asyncio.Event:
    """An event that the first SIGTERM or SIGINT sets. The second one ends the process, even if the loop is blocked."""
    signalled = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(*_: object) -> None:
        _end_on_signals()
        loop.call_soon_threadsafe(signalled.set)

    for number in _SIGNALS:
        signal.signal(number, on_signal)
    return signalled


def _end_on_signals() -> None:
    """Installs handlers, because the default action does not apply to process 1 of a container."""
    for number in _SIGNALS:
        signal.signal(number, lambda received, _: os._exit(at_once(received)))
