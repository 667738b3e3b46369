"""What settings ask for to guard a service: its listener's limits, TLS and tokens, and how it calls others.

The parts are `authentication` here, and `certificates`, `quotas` and `credentials` in `common.security`.
"""

from __future__ import annotations

import ssl

import grpc
import structlog

from common.channels import MAX_RECEIVE_BYTES
from common.security.certificates import ServedCertificate, read_authorities, read_pair
from common.security.credentials import Credentials, is_local, is_unix
from common.security.tokens import Tokens, read_token
from common.serving.authentication import AuthenticationInterceptor
from common.serving.interceptors import RequestInterceptor
from common.serving.settings import ServiceSettings, UpstreamSettings

_OPTIONS = (
    # A larger request is refused before it is read to its end.
    ("grpc.max_receive_message_length", MAX_RECEIVE_BYTES),
    # The second process that would listen at an address is told so, not given half of its connections.
    ("grpc.so_reuseport", 0),
    # Of one connection. Generation has one upstream for each request that runs or waits; what is above this waits in
    # its channel, where no queue's length is told.
    ("grpc.max_concurrent_streams", 1024),
    # A caller that vanished without a word, with its machine or its network, is given up within 80 seconds.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # Channels ping once a minute; who pings more than twice as often is cut off at the third time.
    ("grpc.http2.min_ping_interval_without_data_ms", 30_000),
    ("grpc.http2.max_ping_strikes", 2),
    # Clients connect anew, and so find replicas that came after them. Requests that run are not cut off.
    ("grpc.max_connection_age_ms", 300_000),
)

log = structlog.get_logger()


def guarded_server(settings: ServiceSettings, requests: RequestInterceptor) -> grpc.aio.Server:
    """A server that is yet to listen; callers are known before `requests` sees what they ask.

    Raises StartupError for tokens that cannot be used.
    """
    interceptors: list[grpc.aio.ServerInterceptor] = [requests]
    if settings.auth_tokens_file is not None:
        interceptors.insert(0, AuthenticationInterceptor(Tokens.read(settings.auth_tokens_file)))
        if settings.tls_cert is None and not is_local(settings.listen):
            log.warning("tokens come in plain text, unless something else encrypts them", listen=settings.listen)
    return grpc.aio.server(interceptors=interceptors, options=_OPTIONS)


def listen(server: grpc.aio.Server, settings: ServiceSettings) -> str:
    """Returns whose certificates are asked for: nobody's ("off"), the "server"'s, or both sides' ("mutual").

    Raises StartupError for a certificate that cannot be used, and RuntimeError where the address cannot be had.
    """
    if settings.tls_cert is None or settings.tls_key is None or is_unix(settings.listen):
        server.add_insecure_port(settings.listen)
        return "off"
    served = ServedCertificate(settings.tls_cert, settings.tls_key, settings.tls_client_ca)
    server.add_secure_port(settings.listen, served.credentials)
    return "mutual" if settings.tls_client_ca is not None else "server"


def metrics_tls(settings: ServiceSettings) -> ssl.SSLContext | None:
    """None where /metrics is told in plain text. Raises StartupError for files that cannot be used."""
    if not settings.metrics_tls or settings.tls_cert is None or settings.tls_key is None:
        return None
    # `listen` has not looked at them where it listens on a unix socket.
    read_pair(settings.tls_cert, settings.tls_key, ssl.Purpose.SERVER_AUTH)
    if settings.tls_client_ca is not None:
        read_authorities("--tls-client-ca", settings.tls_client_ca)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=settings.tls_client_ca)
    context.load_cert_chain(settings.tls_cert, settings.tls_key)
    if settings.tls_client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def upstream_credentials(settings: UpstreamSettings) -> Credentials:
    """How the service calls others. Raises StartupError for files that cannot be used."""
    authorities = pair = token = None
    if settings.upstream_tls_ca is not None:
        authorities = read_authorities("--upstream-tls-ca", settings.upstream_tls_ca)
        if settings.tls_cert is not None and settings.tls_key is not None:
            # What the listener shows is a server's; it need be a client's as well only where services ask for one.
            purpose = ssl.Purpose.CLIENT_AUTH if is_unix(settings.listen) else ssl.Purpose.SERVER_AUTH
            pair = read_pair(settings.tls_cert, settings.tls_key, purpose)
    if settings.upstream_token_file is not None:
        token = read_token("--upstream-token-file", settings.upstream_token_file)
    return Credentials(authorities, pair, token, settings.allow_plaintext_token)
