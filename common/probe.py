"""Asks a service whether it is well: exit status 0 if it is SERVING. For healthchecks of containers.

python -m common.probe 127.0.0.1:50053
"""

from __future__ import annotations

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 3.0


def main() -> int:
    with grpc.insecure_channel(sys.argv[1]) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            print(f"{sys.argv[1]} does not answer: {error}", file=sys.stderr)
            return 1
    return 0 if answer.status == health_pb2.HealthCheckResponse.SERVING else 1


if __name__ == "__main__":
    sys.exit(main())
