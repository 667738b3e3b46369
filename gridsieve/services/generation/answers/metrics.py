"""Prometheus metrics of answers: their tokens and times."""

from __future__ import annotations

from prometheus_client import Counter, Histogram

from gridsieve.common.telemetry.metrics import FINE_SECONDS_BUCKETS, SECONDS_BUCKETS
from gridsieve.services.generation.request.request import FinishReason
from gridsieve.services.generation.stage_clock import Stage, StageClock

_PREFIX = "gridsieve_generation_"
_NS = 1e-9

FIRST_TOKEN_SECONDS = Histogram(
    f"{_PREFIX}time_to_first_token_seconds", "From a request's arrival to its first token", buckets=SECONDS_BUCKETS
)
STAGE_SECONDS = Histogram(
    f"{_PREFIX}stage_seconds",
    "Shares of the time to first token by stage; the sums of all stages are the time to first token's sum",
    ["stage"],
    buckets=SECONDS_BUCKETS,
)
INTER_TOKEN_SECONDS = Histogram(
    f"{_PREFIX}inter_token_seconds", "Time between consecutive tokens of an answer", buckets=FINE_SECONDS_BUCKETS
)
ANSWERS = Counter(f"{_PREFIX}answers_total", "Finished answers by finish reason", ["reason"])
CACHED_TOKENS = Counter(
    f"{_PREFIX}cached_prompt_tokens_total", "Prompt tokens, after pruning, found in the prefix cache"
)
PREFIX_LOOKUPS = Counter(
    f"{_PREFIX}prefix_lookups_total",
    "Requests by whether a part of their prompt was found in the prefix cache",
    ["outcome"],
)
GENERATED_TOKENS = Counter(f"{_PREFIX}generated_tokens_total", "Tokens generated")

for _stage in Stage:
    STAGE_SECONDS.labels(_stage.name.lower())
for _reason in FinishReason:
    ANSWERS.labels(_reason.value)
for _outcome in ("hit", "miss"):
    PREFIX_LOOKUPS.labels(_outcome)


def count_first_token(clock: StageClock, cached_tokens: int) -> None:
    """Counts a request's first token. cached_tokens: of its prompt, found in the prefix cache."""
    FIRST_TOKEN_SECONDS.observe(clock.first_token_ns * _NS)
    for stage, duration_ns in clock.stages_ns().items():
        STAGE_SECONDS.labels(stage.name.lower()).observe(duration_ns * _NS)
    CACHED_TOKENS.inc(cached_tokens)
    PREFIX_LOOKUPS.labels("hit" if cached_tokens else "miss").inc()
