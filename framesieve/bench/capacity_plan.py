"""Computes the replicas of each service that a load needs, from the measured cost of one request.

    replicas of a service     ⌈ rate · busy seconds per request / (utilisation · requests it works on at once) ⌉
    tokens in the KV cache    rate · mean(tokens · seconds in the cache)                           Little's law
    bytes of media held       rate · bytes of a request's embeddings · seconds of the request      Little's law
    network, bytes/s          rate · bytes per request on that hop

docs/capacity.md derives the formulas and states their limits. This module knows neither files nor output.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

HOPS = {
    "preprocessing": "encoder to preprocessing",
    "encoder": "generation to encoder",
    "generation": "client to generation",
}
"""Every service, and the network hop between it and its caller."""

# fetch waits for a download; transfer is checked outside the engine thread; prefill is part of "step".
_NOT_COUNTED = {"fetch", "transfer", "prefill"}


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one request to one service.

    busy_s: seconds of work, by stage. at_once: requests that one replica works on at a time.
    processor_s: processor seconds, over all cores. hop_bytes: both directions of the hop to its caller.
    """

    busy_s: Mapping[str, float]
    at_once: int
    processor_s: float
    hop_bytes: float

    @property
    def work_s(self) -> float:
        return sum(seconds for stage, seconds in self.busy_s.items() if stage not in _NOT_COUNTED)


@dataclass(frozen=True, slots=True)
class Request:
    """The mean request.

    costs: by service.
    kv_token_s: its tokens times the seconds that they occupy the KV cache.
    embeds_byte_s: the bytes of its embeddings times the seconds that generation holds them.
    """

    costs: Mapping[str, Cost]
    kv_token_s: float
    embeds_byte_s: float


@dataclass(frozen=True, slots=True)
class Load:
    """The load to plan for.

    utilisation: the fraction of time and memory that the plan may use.
    kv_cache_tokens, media_buffer_bytes: capacity of one generation replica.
    """

    requests_per_s: float
    utilisation: float
    kv_cache_tokens: int
    media_buffer_bytes: int


@dataclass(frozen=True, slots=True)
class Need:
    """The demand on one resource: how much is in use at a time, and how many replicas provide enough of it."""

    used: float
    replicas: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The result.

    working: by service, the requests worked on at a time.
    kv_cache, media_buffer: tokens and bytes held at a time, over all generation replicas.
    cores: by service, processor cores over all its replicas. network_bytes_per_s: on the hop to each service's caller.
    """

    working: Mapping[str, Need]
    kv_cache: Need
    media_buffer: Need
    cores: Mapping[str, float]
    network_bytes_per_s: Mapping[str, float]

    @property
    def replicas(self) -> dict[str, int]:
        """By service: enough for its work; for generation also enough for its KV cache and media buffer."""
        found = {service: need.replicas for service, need in self.working.items()}
        found["generation"] = max(found["generation"], self.kv_cache.replicas, self.media_buffer.replicas)
        return found


def plan(request: Request, load: Load) -> Plan:
    """The plan for `load` if each of its requests costs as much as `request`."""

    def need(used: float, of_one: float) -> Need:
        return Need(used, max(1, math.ceil(used / (load.utilisation * of_one))))

    rate = load.requests_per_s
    costs = request.costs
    return Plan(
        working={service: need(rate * cost.work_s, cost.at_once) for service, cost in costs.items()},
        kv_cache=need(rate * request.kv_token_s, load.kv_cache_tokens),
        media_buffer=need(rate * request.embeds_byte_s, load.media_buffer_bytes),
        cores={service: rate * cost.processor_s / load.utilisation for service, cost in costs.items()},
        network_bytes_per_s={service: rate * cost.hop_bytes for service, cost in costs.items()},
    )
