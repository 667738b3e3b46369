"""Asks a service whether it is well: exit status 0 if it is SERVING. For healthchecks of containers.

python -m common.probe 127.0.0.1:50053

By TLS where FRAMESIEVE_UPSTREAM_TLS_CA names the authorities of the service's certificate, which must name the address;
FRAMESIEVE_TLS_CERT and FRAMESIEVE_TLS_KEY are shown if it asks: a service's own environment will do. No token is asked.
"""

from __future__ import annotations

import os
import ssl
import sys
from collections.abc import Mapping
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.certificates import read_authorities, read_pair
from common.channels import NO_PROXY
from common.credentials import NO_CREDENTIALS, Credentials
from common.errors import StartupError

TIMEOUT_S = 3.0


def own_credentials(environment: Mapping[str, str]) -> Credentials:
    """What services with this environment trust and show.

    Raises StartupError for files that cannot be used, and where they speak TLS and nothing says whom to trust.
    """
    authorities, cert, key = (
        environment.get(f"FRAMESIEVE_{name}") for name in ("UPSTREAM_TLS_CA", "TLS_CERT", "TLS_KEY")
    )
    if cert and not authorities:
        raise StartupError(f"FRAMESIEVE_TLS_CERT {cert} needs FRAMESIEVE_UPSTREAM_TLS_CA, to ask for health by TLS")
    if not authorities:
        return NO_CREDENTIALS
    pair = read_pair(Path(cert), Path(key), ssl.Purpose.SERVER_AUTH) if cert and key else None
    return Credentials(read_authorities("--upstream-tls-ca", Path(authorities)), pair)


def is_serving(address: str, credentials: Credentials, timeout_s: float) -> bool:
    """Whether the service there says so. Raises RpcError where nobody answers in time."""
    tls = credentials.for_channel(address)
    options = (NO_PROXY,)
    with grpc.secure_channel(address, tls, options) if tls else grpc.insecure_channel(address, options) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def main() -> int:
    address = sys.argv[1]
    try:
        return 0 if is_serving(address, own_credentials(os.environ), TIMEOUT_S) else 1
    except (StartupError, grpc.RpcError) as error:
        print(f"{address} does not answer: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
