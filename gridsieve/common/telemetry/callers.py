"""What each caller used, by the name of its token in --auth-tokens-file; without that file there are no series.

Each service counts the callers whose tokens it checks. A gateway without a token of its own passes its callers' tokens
on, so generation counts them. A gateway with a token of its own counts its callers, and generation counts the gateway.
"""

from __future__ import annotations

from collections.abc import Iterable

import structlog
from prometheus_client import Counter

from gridsieve.common.telemetry.logs import RequestStats

_KINDS = {"prompt": "prompt_tokens", "completion": "completion_tokens"}
"""The label of the metric, and the request's stat."""

TOKENS = Counter(
    "gridsieve_client_tokens_total",
    "Tokens of prompts, after pruning, and of answers, by the name of the caller's token",
    ["client", "kind"],
)
SECONDS = Counter(
    "gridsieve_client_seconds_total",
    "Seconds that requests with a prompt ran, each from its arrival to its end, by the name of the caller's token",
    ["client"],
)
FAMILIES = frozenset(family.name for counter in (TOKENS, SECONDS) for family in counter.describe())
"""As collectors name them: without `_total`."""


def begin_callers(names: Iterable[str]) -> None:
    """Creates the series of these names."""
    for name in names:
        SECONDS.labels(name)
        for kind in _KINDS:
            TOKENS.labels(name, kind)


def count_caller(stats: RequestStats, seconds: float) -> None:
    """Counts the request that ends, if its caller showed a token and its prompt was computed, or begun."""
    name = structlog.contextvars.get_contextvars().get("client")  # bound where tokens are checked
    if name is None or not stats.keys() & _KINDS.values():
        return
    SECONDS.labels(name).inc(seconds)
    for kind, stat in _KINDS.items():
        TOKENS.labels(name, kind).inc(stats[stat])
