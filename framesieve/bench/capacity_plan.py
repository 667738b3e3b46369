"""How many replicas of each service a load needs, from what one request was measured to cost.

    replicas of a service   ⌈ rate · busy seconds a request / (utilisation · how many it works on at once) ⌉
    tokens in the KV cache    rate · mean(tokens · seconds that they lie there)                    Little's law
    bytes of media held       rate · bytes of a request's embeddings · seconds that it lasts
    network, bytes a second   rate · bytes a request on that hop

docs/capacity.md says where the formulas come from and end. This knows neither files nor how a plan is shown.
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
"""Every service, and the hop in front of it."""

# Waiting for a download; checking what arrives, beside the engine's thread; and what its steps hold, counted whole.
_NOT_COUNTED = {"fetch", "transfer", "prefill"}


@dataclass(frozen=True, slots=True)
class Cost:
    """What one request cost one service.

    busy_s: time spent working, by stage. at_once: how many requests one replica works on at a time.
    processor_s: of all processor cores. hop_bytes: both ways, on the hop in front of it.
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
    """A request of the mean.

    costs: by service.
    kv_token_s: its tokens times the seconds that they lie in the KV cache.
    embeds_byte_s: the bytes of its media's embeddings times the seconds that generation holds them.
    """

    costs: Mapping[str, Cost]
    kv_token_s: float
    embeds_byte_s: float


@dataclass(frozen=True, slots=True)
class Load:
    """What is to be served, and by what. utilisation: share of the time, or of the room, that is planned to be used.

    kv_cache_tokens, media_buffer_bytes: of one replica of generation.
    """

    requests_per_s: float
    utilisation: float
    kv_cache_tokens: int
    media_buffer_bytes: int


@dataclass(frozen=True, slots=True)
class Need:
    """Of one service, or of one room: how much of it is used at the same time, and how many replicas have enough."""

    used: float
    replicas: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What the load needs.

    working: by service, how many requests are worked on at a time.
    kv_cache, media_buffer: tokens and bytes held at a time, over all replicas of generation.
    cores: by service, processor cores over all its replicas. network_bytes_per_s: by the service behind the hop.
    """

    working: Mapping[str, Need]
    kv_cache: Need
    media_buffer: Need
    cores: Mapping[str, float]
    network_bytes_per_s: Mapping[str, float]

    @property
    def replicas(self) -> dict[str, int]:
        """By service: enough for its work, and generation's for what it must hold."""
        found = {service: need.replicas for service, need in self.working.items()}
        found["generation"] = max(found["generation"], self.kv_cache.replicas, self.media_buffer.replicas)
        return found


def plan(request: Request, load: Load) -> Plan:
    """What `load` needs where its requests cost as much as `request`."""

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
