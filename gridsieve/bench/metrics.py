"""What a load cost the services: the increase of their Prometheus metrics between its start and its end.

It knows the names of a few metrics (docs/metrics.md) and nothing of requests or reports.
"""

from __future__ import annotations

import asyncio
import http.client
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from prometheus_client.parser import text_string_to_metric_families

from gridsieve.common.contract.errors import InvalidRequest, Unavailable

Labels: TypeAlias = frozenset[tuple[str, str]]
Samples: TypeAlias = Mapping[tuple[str, Labels], float]
"""Values by metric name and labels."""

_TIMEOUT_S = 5.0
_BUILD = "gridsieve_build_info"
_BUSY = "gridsieve_stage_busy_seconds_sum"
_STEP = "gridsieve_generation_step_seconds_sum"
_MESSAGES = "gridsieve_message_bytes_total"
_WORKERS = "gridsieve_preprocessing_workers"
_PROCESSOR = "process_cpu_seconds_total"


@dataclass(frozen=True, slots=True)
class Spent:
    """The cost of a load to all replicas of one service together.

    busy_s: seconds of work by stage; "step" is the time of generation's engine steps.
    processor_s: processor seconds of the service's main processes, without preprocessing's worker processes.
    received_bytes, sent_bytes: of messages between the service and its callers.
    workers: decode workers of one preprocessing replica; 0 for the other services.
    """

    service: str
    replicas: int
    busy_s: dict[str, float]
    processor_s: float
    received_bytes: float
    sent_bytes: float
    workers: int


async def read_metrics(addresses: Sequence[str]) -> tuple[Samples, ...]:
    """The current samples of each host:port. Raises Unavailable if it cannot be read, InvalidRequest if not ours."""
    return tuple(await asyncio.gather(*(asyncio.to_thread(_read, address) for address in addresses)))


def _read(address: str) -> Samples:
    try:
        connection = http.client.HTTPConnection(address, timeout=_TIMEOUT_S)
        try:
            connection.request("GET", "/metrics")
            answer = connection.getresponse()
            body = answer.read()
        finally:
            connection.close()
    except (OSError, http.client.HTTPException) as error:
        raise Unavailable(f"no metrics at {address}: {error}", "metrics") from error
    try:
        families = list(text_string_to_metric_families(body.decode())) if answer.status == http.client.OK else []
    except ValueError as error:
        raise InvalidRequest(f"--metrics: {address}/metrics is not in Prometheus' text format: {error}") from error
    samples = {(each.name, frozenset(each.labels.items())): each.value for one in families for each in one.samples}
    if not any(name == _BUILD for name, _ in samples):
        raise InvalidRequest(f"--metrics: {address}/metrics has no {_BUILD}: it is not a gridsieve service")
    return samples


def spent(before: Sequence[Samples], after: Sequence[Samples]) -> tuple[Spent, ...]:
    """One entry per service, in order of first appearance. before, after: read from the same addresses."""
    by_service: dict[str, list[tuple[Samples, Samples]]] = {}
    for then, now in zip(before, after, strict=True):
        (service,) = {label for name, labels in now if name == _BUILD for label in _values(labels, "service")}
        by_service.setdefault(service, []).append((then, now))
    return tuple(_of_service(service, replicas) for service, replicas in by_service.items())


def _of_service(service: str, replicas: Sequence[tuple[Samples, Samples]]) -> Spent:
    def total(name: str, label: str = "", value: str = "") -> float:
        return sum(
            amount - then.get(key, 0.0)
            for then, now in replicas
            for key, amount in now.items()
            if key[0] == name and (not label or (label, value) in key[1])
        )

    stages = {
        stage for _, now in replicas for name, labels in now if name == _BUSY for stage in _values(labels, "stage")
    }
    busy_s = {stage: total(_BUSY, "stage", stage) for stage in sorted(stages)}
    if any(name == _STEP for name, _ in replicas[0][1]):
        busy_s["step"] = total(_STEP)
    return Spent(
        service=service,
        replicas=len(replicas),
        busy_s=busy_s,
        processor_s=total(_PROCESSOR),
        received_bytes=total(_MESSAGES, "direction", "received"),
        sent_bytes=total(_MESSAGES, "direction", "sent"),
        workers=int(replicas[0][1].get((_WORKERS, frozenset({("pool", "decode")})), 0)),
    )


def _values(labels: Labels, name: str) -> list[str]:
    return [value for key, value in labels if key == name]
