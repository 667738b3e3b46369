"""/metrics over HTTP, by TLS where that is asked for. Whoever connects and does not ask costs the service little.

What is told is in `common.telemetry.metrics` and the `metrics.py` of each service.
"""

from __future__ import annotations

import socket
import ssl
import sys
import threading
import time
from contextlib import suppress
from http.server import ThreadingHTTPServer
from typing import Any

import structlog
from prometheus_client import MetricsHandler, disable_created_metrics

# One asks every few seconds. Each has a thread and a descriptor, of which gRPC needs its share.
MAX_CONNECTIONS = 32
# For a whole request and its answer, a handshake counted in, however often something of it comes.
REQUEST_S = 10.0

log = structlog.get_logger()


def serve_metrics(port: int, host: str, tls: ssl.SSLContext | None = None) -> None:
    """Serves from threads of its own; port 0: nowhere. Raises OSError where the address cannot be had."""
    disable_created_metrics()  # type: ignore[no-untyped-call]  # as many series again, which no query reads
    if port:
        threading.Thread(target=_Server(host, port, tls).serve_forever, name="metrics", daemon=True).start()


class _Server(ThreadingHTTPServer):
    """A connection beyond the last that may be open is closed at once, and each once its time is over."""

    request_queue_size = MAX_CONNECTIONS

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None) -> None:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, *_, address = found[0]
        self._lock = threading.Lock()
        self._open: dict[Any, float] = {}  # since when
        super().__init__(address, MetricsHandler)  # type: ignore[arg-type]  # typeshed takes no IPv6 address
        if tls is not None:
            # Hands are shaken in a connection's own thread: who says nothing keeps nobody else from connecting.
            self.socket = tls.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        if len(self._open) >= MAX_CONNECTIONS:
            return False
        with self._lock:
            self._open[request] = time.monotonic()
        return True

    def service_actions(self) -> None:
        """Called twice a second: a thread that waits for the other side, to be told or to take, waits no longer."""
        with self._lock:
            late = time.monotonic() - REQUEST_S
            for request in [each for each, since in self._open.items() if since < late]:
                with suppress(OSError):
                    # Not its own `shutdown`, by which an ssl.SSLSocket would go on in plain text.
                    socket.socket.shutdown(request, socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # which is whoever has left, or speaks no TLS
            log.exception("bug in metrics")
