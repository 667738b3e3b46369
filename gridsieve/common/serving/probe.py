"""Asks a service for its health: exit status 0 if it is SERVING, else 1. For health checks of containers.

    python -m gridsieve.common.serving.probe 127.0.0.1:50053
    python -m gridsieve.common.serving.probe http 127.0.0.1:8000

It reads the environment of the service. If that sets GRIDSIEVE_TLS_CERT and the address is no unix socket, it connects
with TLS: GRIDSIEVE_UPSTREAM_TLS_CA must hold the authorities of that certificate, which must name the address, and the
certificate is also its own if the service asks for one. Health needs no token.
"""

from __future__ import annotations

import os
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gridsieve.common.address import is_unix
from gridsieve.common.channels import NO_PROXY
from gridsieve.common.contract.errors import StartupError
from gridsieve.common.security.certificates import read_authorities, read_pair
from gridsieve.common.security.credentials import NO_CREDENTIALS, Credentials

TIMEOUT_S = 3.0


def own_credentials(address: str, environment: Mapping[str, str]) -> Credentials:
    """Credentials for asking a service with this environment for its health, at the address that it listens on.

    Raises StartupError for unusable files, and for TLS without GRIDSIEVE_UPSTREAM_TLS_CA.
    """
    authorities, cert, key = (
        environment.get(f"GRIDSIEVE_{name}") for name in ("UPSTREAM_TLS_CA", "TLS_CERT", "TLS_KEY")
    )
    if not cert or is_unix(address):
        return NO_CREDENTIALS
    if not authorities:
        raise StartupError(f"GRIDSIEVE_TLS_CERT {cert} needs GRIDSIEVE_UPSTREAM_TLS_CA, to query health over TLS")
    pair = read_pair(Path(cert), Path(key), ssl.Purpose.SERVER_AUTH) if key else None
    return Credentials(read_authorities("--upstream-tls-ca", Path(authorities)), pair)


def is_serving(address: str, credentials: Credentials, timeout_s: float) -> bool:
    """Whether the service at the address reports SERVING. Raises RpcError if it does not answer in time."""
    tls = credentials.for_channel(address)
    options = (NO_PROXY,)
    with grpc.secure_channel(address, tls, options) if tls else grpc.insecure_channel(address, options) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def http_url(address: str, environment: Mapping[str, str]) -> str:
    """Where a gateway with this environment serves HTTP."""
    return f"{'https' if environment.get('GRIDSIEVE_TLS_CERT') else 'http'}://{address}"


def serves_http(address: str, environment: Mapping[str, str], timeout_s: float) -> bool:
    """Whether the gateway at the address, with this environment, is healthy. Raises OSError if it does not answer."""
    url = http_url(address, environment)
    tls = None
    if url.startswith("https"):
        tls = ssl.create_default_context(cafile=environment.get("GRIDSIEVE_UPSTREAM_TLS_CA"))
        if environment.get("GRIDSIEVE_TLS_KEY"):
            tls.load_cert_chain(environment["GRIDSIEVE_TLS_CERT"], environment["GRIDSIEVE_TLS_KEY"])
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=timeout_s, context=tls) as answer:  # noqa: S310  (http or https)
            return bool(answer.status == HTTPStatus.OK)
    except urllib.error.HTTPError:
        return False


def main() -> int:
    *kind, address = sys.argv[1:]
    try:
        if kind == ["http"]:
            return 0 if serves_http(address, os.environ, TIMEOUT_S) else 1
        return 0 if is_serving(address, own_credentials(address, os.environ), TIMEOUT_S) else 1
    except (StartupError, grpc.RpcError, OSError) as error:
        print(f"{address} does not answer: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
