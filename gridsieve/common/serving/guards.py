"""Network side of a service as its settings describe it: listener, TLS, tokens, /metrics, and credentials upstream."""

from __future__ import annotations

import socket
import ssl
import sys
from typing import Any

import grpc
import structlog
from prometheus_client import disable_created_metrics, start_http_server

from gridsieve.common.address import is_local, is_unix
from gridsieve.common.contract.errors import StartupError
from gridsieve.common.contract.limits import REQUEST_OVERHEAD_BYTES
from gridsieve.common.security.certificates import ServedCertificate, read_authorities, read_pair
from gridsieve.common.security.credentials import Credentials
from gridsieve.common.security.quotas import ClientQuotas
from gridsieve.common.security.tokens import Tokens, read_token
from gridsieve.common.serving.interceptors import RequestInterceptor
from gridsieve.common.serving.settings import CallerSettings, ListenerSettings, ServiceSettings
from gridsieve.common.telemetry.callers import begin_callers

_OPTIONS = (
    # A second process on the same address fails, instead of getting half of the connections.
    ("grpc.so_reuseport", 0),
    # Per connection. Generation has one upstream call for each request that runs or waits, and a gateway one for each
    # live session. Calls above this limit, those of health among them, wait inside a channel, where no queue length can
    # be measured: --max-requests and --live-tokens bound them.
    ("grpc.max_concurrent_streams", 2**14),
    # Connections of callers that vanished with their machine or network are closed within 80 seconds.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # Channels ping once a minute. Clients that ping more than twice as often are disconnected at the third ping.
    ("grpc.http2.min_ping_interval_without_data_ms", 30_000),
    ("grpc.http2.max_ping_strikes", 2),
    # Clients reconnect after this age, and so find replicas that were added. Running requests are not interrupted.
    ("grpc.max_connection_age_ms", 300_000),
)

# Of one read or write of a connection to /metrics: a client that stops halfway must not keep its thread.
_METRICS_TIMEOUT_S = 10.0

log = structlog.get_logger()


def check_ports(settings: ServiceSettings) -> None:
    """Raises StartupError for ports in use and for addresses of other machines, before a service loads its model."""
    check_listen(settings)
    if settings.metrics_port:
        where = f"cannot serve metrics on --metrics-port {settings.metrics_port}"
        _try_to_bind(where, _metrics_host(settings), settings.metrics_port)


def check_listen(settings: ListenerSettings) -> None:
    """Raises StartupError for an address in use, or of another machine."""
    host, _, port = settings.listen.rpartition(":")
    if not is_unix(settings.listen):
        _try_to_bind(f"cannot listen on --listen {settings.listen}", host.strip("[]"), int(port))


def _try_to_bind(what: str, host: str, port: int) -> None:
    """Raises StartupError, which begins with `what`, unless one of the host's addresses can be bound."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise StartupError(f"{what}: {error.strerror}") from error
    why = ""
    for family, kind, _, _, address in found:
        try:
            with socket.socket(family, kind) as tried:
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC and prometheus_client do
                tried.bind(address)
                return
        except OSError as error:
            why = str(error.strerror)
    raise StartupError(f"{what}: {why}")


def guarded_server(
    settings: ServiceSettings, quotas: ClientQuotas, stage: str, counts_callers: bool = False
) -> tuple[grpc.aio.Server, RequestInterceptor]:
    """A server that does not listen yet, and what surrounds its requests.

    stage: the service's name. counts_callers: whether its methods count tokens, which then have series for each caller.
    Raises StartupError for an unusable tokens file.
    """
    tokens = None
    if settings.auth_tokens_file is not None:
        tokens = Tokens.read(settings.auth_tokens_file)
        if counts_callers:
            begin_callers(tokens.names)
        if settings.tls_cert is None and not is_local(settings.listen):
            log.warning("callers send tokens in plain text, because --tls-cert is not set", listen=settings.listen)
    # gRPC refuses a larger request before it has read it.
    limit = ("grpc.max_receive_message_length", settings.max_inline_bytes + REQUEST_OVERHEAD_BYTES)
    requests = RequestInterceptor(quotas, stage, tokens)
    return grpc.aio.server(interceptors=[requests], options=(*_OPTIONS, limit)), requests


def listen(server: grpc.aio.Server, settings: ServiceSettings) -> str:
    """Binds the server to --listen. Returns its TLS: "off", "server", or "mutual" with client certificates.

    Raises StartupError for an unusable certificate or address.
    """
    try:
        if settings.tls_cert is None or settings.tls_key is None or is_unix(settings.listen):
            server.add_insecure_port(settings.listen)
            return "off"
        served = ServedCertificate(settings.tls_cert, settings.tls_key, settings.tls_client_ca)
        server.add_secure_port(settings.listen, served.credentials)
    except (RuntimeError, OSError) as error:
        raise StartupError(f"cannot listen on --listen {settings.listen}: {error}") from error
    return "mutual" if settings.tls_client_ca is not None else "server"


def serve_metrics(settings: ServiceSettings) -> None:
    """Serves /metrics in threads of prometheus_client, on the host of --listen, or on loopback for a unix socket.

    Raises StartupError for unusable certificates or a port in use.
    """
    disable_created_metrics()  # type: ignore[no-untyped-call]  # they double the series, and no query reads them
    if not settings.metrics_port:
        return
    tls: dict[str, Any] = {}
    if settings.metrics_tls and settings.tls_cert is not None and settings.tls_key is not None:
        # `listen` does not check these files if it listens on a unix socket.
        read_pair(settings.tls_cert, settings.tls_key, ssl.Purpose.SERVER_AUTH)
        tls = {"certfile": str(settings.tls_cert), "keyfile": str(settings.tls_key)}
        if settings.tls_client_ca is not None:
            read_authorities("--tls-client-ca", settings.tls_client_ca)
            tls |= {"client_cafile": str(settings.tls_client_ca), "client_auth_required": True}
    try:
        server, _ = start_http_server(settings.metrics_port, _metrics_host(settings), **tls)
    except OSError as error:
        raise StartupError(f"cannot serve metrics on --metrics-port {settings.metrics_port}: {error}") from error
    if isinstance(server.socket, ssl.SSLSocket):
        # Handshakes run in the thread of each connection, so that a client that sends nothing blocks no other.
        server.socket.do_handshake_on_connect = False  # type: ignore[attr-defined]  # the stub lacks it
    server.RequestHandlerClass.timeout = _METRICS_TIMEOUT_S  # type: ignore[attr-defined]  # StreamRequestHandler has it
    server.handle_error = _log_error  # type: ignore[method-assign]  # the default prints tracebacks to stderr


def _metrics_host(settings: ServiceSettings) -> str:
    return "127.0.0.1" if is_unix(settings.listen) else settings.listen.rpartition(":")[0].strip("[]")


def _log_error(request: Any, client_address: Any) -> None:
    if not isinstance(sys.exc_info()[1], OSError):  # a client that disconnected or failed the TLS handshake
        log.exception("bug in metrics")


def upstream_credentials(settings: CallerSettings) -> Credentials:
    """The credentials for calls to other services. Raises StartupError for unusable files."""
    authorities = pair = token = None
    if settings.upstream_tls_ca is not None:
        authorities = read_authorities("--upstream-tls-ca", settings.upstream_tls_ca)
        if settings.tls_cert is not None and settings.tls_key is not None:
            # A listener on TCP shows a server certificate. It may lack the client purpose: only services that ask for
            # client certificates need it.
            purpose = ssl.Purpose.CLIENT_AUTH if is_unix(settings.listen) else ssl.Purpose.SERVER_AUTH
            pair = read_pair(settings.tls_cert, settings.tls_key, purpose)
    if settings.upstream_token_file is not None:
        token = read_token("--upstream-token-file", settings.upstream_token_file)
    return Credentials(authorities, pair, token, settings.allow_plaintext_token)
