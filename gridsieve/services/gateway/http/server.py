"""Runs the application with uvicorn on --listen, with TLS, until a signal; then drains."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

import structlog
import uvicorn
from starlette.types import ASGIApp

from gridsieve.common.address import is_unix
from gridsieve.common.contract.errors import StartupError
from gridsieve.common.contract.limits import MAX_PICTURE_BYTES
from gridsieve.common.process import ExitStatus
from gridsieve.common.security.certificates import file_stamps, read_authorities, read_pair
from gridsieve.common.serving.server import first_signal
from gridsieve.common.telemetry.metrics import SERVING
from gridsieve.services.gateway.http.body import inline_body_bytes
from gridsieve.services.gateway.http.drain import Drain
from gridsieve.services.gateway.http.websocket import WebSocketProtocol
from gridsieve.services.gateway.settings import GatewaySettings

_CERTIFICATE_S = 1.0
_KEEP_ALIVE_S = 75
# Time that clients get, after the drain, to read what is left of their responses.
_LINGER_S = 2

log = structlog.get_logger()


class _Server(uvicorn.Server):
    """uvicorn's own handling of signals ends connections without a status."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(app: ASGIApp, drain: Drain, settings: GatewaySettings) -> ExitStatus:
    """Serves until SIGTERM or SIGINT, then drains: health answers 503 and running requests may finish.

    drain: of the application's requests.
    Returns CUT_OFF if requests outlasted --drain-s, else FINISHED. Raises StartupError for unusable TLS files or where
    it cannot listen.
    """
    host, _, port = settings.listen.rpartition(":")
    on_socket = is_unix(settings.listen)
    config = uvicorn.Config(
        app,
        host=host.strip("[]"),
        port=0 if on_socket else int(port),
        uds=settings.listen.removeprefix("unix:") if on_socket else None,
        http="httptools",
        ws=WebSocketProtocol,
        ws_max_size=inline_body_bytes(min(settings.max_inline_bytes, MAX_PICTURE_BYTES)),
        ws_per_message_deflate=False,  # pictures are compressed
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_LINGER_S,
    )
    config.load()
    config.ssl = tls = _tls(settings)
    server = _Server(config)
    stopping = first_signal()
    running = asyncio.create_task(server.serve())
    while not server.started:
        if running.done():
            raise StartupError(f"cannot listen on --listen {settings.listen}")
        await asyncio.sleep(0.01)
    SERVING.set(1)
    log.info(
        "serving",
        listen=settings.listen,
        tls="off" if tls is None else "mutual" if settings.tls_client_ca else "server",
        tokens=settings.auth_tokens_file is not None,
        generation=settings.generation,
    )
    renewing = asyncio.create_task(_renew(tls, settings)) if tls else None
    await stopping.wait()
    log.info("draining", grace_s=settings.drain_s)
    if renewing:
        renewing.cancel()
    SERVING.set(0)
    cut_off = await drain.finish(settings.drain_s)
    server.should_exit = True
    await running
    log.info("stopped", cut_off=cut_off)
    return ExitStatus.CUT_OFF if cut_off else ExitStatus.FINISHED


def _tls(settings: GatewaySettings) -> ssl.SSLContext | None:
    if settings.tls_cert is None or settings.tls_key is None or is_unix(settings.listen):
        return None
    read_pair(settings.tls_cert, settings.tls_key, ssl.Purpose.SERVER_AUTH)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(settings.tls_cert, settings.tls_key)
    if settings.tls_client_ca is not None:
        read_authorities("--tls-client-ca", settings.tls_client_ca)
        context.load_verify_locations(settings.tls_client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


async def _renew(tls: ssl.SSLContext, settings: GatewaySettings) -> None:
    """New connections get the certificate that its files hold. One that cannot be used is logged."""
    assert settings.tls_cert is not None
    assert settings.tls_key is not None
    stamps = file_stamps(settings.tls_cert, settings.tls_key)
    while True:
        await asyncio.sleep(_CERTIFICATE_S)
        if (now := file_stamps(settings.tls_cert, settings.tls_key)) == stamps:
            continue
        stamps = now
        try:
            read_pair(settings.tls_cert, settings.tls_key, ssl.Purpose.SERVER_AUTH)
            tls.load_cert_chain(settings.tls_cert, settings.tls_key)
        except (StartupError, OSError) as error:
            log.error("the new certificate cannot be used, the previous one stays in use", error=str(error))
        else:
            log.info("the certificate was reloaded", path=str(settings.tls_cert))
