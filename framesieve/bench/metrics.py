"""What services spent on a load, by their own count: their /metrics before it and after it, and the difference.

It knows the names of a few metrics (docs/metrics.md) and nothing of what is asked, nor of what is made of them.
"""

from __future__ import annotations

import asyncio
import http.client
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from prometheus_client.parser import text_string_to_metric_families

from common.contract.errors import InvalidRequest, Unavailable

Labels: TypeAlias = frozenset[tuple[str, str]]
Samples: TypeAlias = Mapping[tuple[str, Labels], float]
"""By name and labels."""

_TIMEOUT_S = 5.0
_BUILD = "framesieve_build_info"
_BUSY = "framesieve_stage_busy_seconds_sum"
_STEP = "framesieve_generation_step_seconds_sum"
_MESSAGES = "framesieve_message_bytes_total"
_WORKERS = "framesieve_preprocessing_workers"
_PROCESSOR = "process_cpu_seconds_total"


@dataclass(frozen=True, slots=True)
class Spent:
    """What all replicas of one service spent together.

    busy_s: time spent working, by stage, and generation's engine in its steps as "step".
    processor_s: of the service's processes, without the workers that preprocessing has.
    received_bytes, sent_bytes: of messages on the hop in front of the service.
    workers: of preprocessing, those that decode, in one replica; 0 elsewhere.
    """

    service: str
    replicas: int
    busy_s: dict[str, float]
    processor_s: float
    received_bytes: float
    sent_bytes: float
    workers: int


async def read_metrics(addresses: Sequence[str]) -> tuple[Samples, ...]:
    """What each address (host:port) exposes now. Raises Unavailable where nothing is, InvalidRequest for nonsense."""
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
        raise InvalidRequest(f"--metrics: {address} exposes no Prometheus text: {error}") from error
    samples = {(each.name, frozenset(each.labels.items())): each.value for one in families for each in one.samples}
    if not any(name == _BUILD for name, _ in samples):
        raise InvalidRequest(f"--metrics: {address}/metrics has no {_BUILD}: no service of framesieve answers there")
    return samples


def spent(before: Sequence[Samples], after: Sequence[Samples]) -> tuple[Spent, ...]:
    """One entry a service, in the order in which they were first named. Both: as read from the same addresses."""
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
