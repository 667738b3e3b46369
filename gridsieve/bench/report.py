"""Aggregates the records of a load into distributions, throughput and errors, and formats them as JSON and text.

The table has the figures that `vllm bench serve` prints, by its names, and those that only pruning and the three
services have. It knows nothing of how requests were sent.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gridsieve.bench.measure import Failure, Record
from gridsieve.client.answer import STAGES
from gridsieve.client.prompt import Pruning
from gridsieve.common.contract.retention import NONE

_NAME_WIDTH = 38
_COLUMNS = {"mean": "Mean", "p50": "Median", "p99": "P99"}


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean, percentiles and maximum of n values.

    Percentile q of the sorted values v[0 … n − 1] is their linear interpolation at index q / 100 · (n − 1).
    """

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Distribution | None:
        """None without values."""
        if not values:
            return None
        p50, p90, p99 = np.percentile(values, (50, 90, 99), method="linear").tolist()
        return cls(statistics.fmean(values), p50, p90, p99, max(values))


@dataclass(frozen=True, slots=True)
class Failures:
    """Requests that failed with the same status and reason, and the message of the first."""

    status: str
    reason: str
    count: int
    example: str


@dataclass(frozen=True, slots=True)
class Report:
    """The report of a load at one pruning. Latencies, tokens, peaks and stages are those of the answered requests.

    wall_s: from its start to its last completion, or to its interruption.
    first_token_s, total_s: from when a request was due; time_per_output_token_s: a value for each request;
        token_gap_s: pooled over the tokens of all requests.
    late_s: delay between when a request was due and when it was sent; caused by this machine, not the server.
    prompt_tokens: after pruning; cached_prompt_tokens: how many of them were prefix cache hits.
    peak_output_tokens_per_s: tokens of the best second, of seconds counted from when the first request was sent.
    peak_concurrent_requests: requests that were sent and not yet answered at one time.
    stages_s: medians, by stage; empty if no request was answered.
    held_s: mean time from a request's arrival to the end of its completion, on the server's clock.
    kv_token_s: mean of a request's tokens times the seconds that they occupy the KV cache (prefill and decode).
    """

    pruning: Pruning
    wall_s: float
    asked: int
    answered: int
    first_token_s: Distribution | None
    time_per_output_token_s: Distribution | None
    token_gap_s: Distribution | None
    total_s: Distribution | None
    late_s: Distribution | None
    prompt_tokens_full: int
    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int
    peak_output_tokens_per_s: int
    peak_concurrent_requests: int
    stages_s: dict[str, float]
    held_s: float | None
    kv_token_s: float | None
    failures: tuple[Failures, ...]

    @classmethod
    def of(cls, pruning: Pruning, records: Sequence[Record], wall_s: float) -> Report:
        answered = [record for record in records if record.failure is None]
        costs = [(each.usage, each.timings) for each in answered if each.usage and each.timings]
        usages = [usage for usage, _ in costs]
        stages = [timings.stages_s for _, timings in costs]
        return cls(
            pruning=pruning,
            wall_s=wall_s,
            asked=len(records),
            answered=len(answered),
            first_token_s=Distribution.of(_known(each.first_token_s for each in answered)),
            time_per_output_token_s=Distribution.of(_known(each.time_per_output_token_s for each in answered)),
            token_gap_s=Distribution.of([gap for each in answered for gap in each.token_gaps_s]),
            total_s=Distribution.of([each.total_s for each in answered]),
            late_s=Distribution.of([record.begun_s - record.due_s for record in records]),
            prompt_tokens_full=sum(usage.prompt_tokens_full for usage in usages),
            prompt_tokens=sum(usage.prompt_tokens for usage in usages),
            cached_prompt_tokens=sum(usage.cached_prompt_tokens for usage in usages),
            completion_tokens=sum(usage.completion_tokens for usage in usages),
            peak_output_tokens_per_s=_peak_tokens_per_s(answered),
            peak_concurrent_requests=_peak_concurrent(answered),
            stages_s={name: statistics.median(each[name] for each in stages) for name in (stages[0] if stages else ())},
            held_s=_mean([timings.time_to_first_token_s + timings.generate_s for _, timings in costs]),
            kv_token_s=_mean(
                [
                    (usage.prompt_tokens + usage.completion_tokens) * (timings.prefill_s + timings.generate_s)
                    for usage, timings in costs
                ]
            ),
            failures=_failures(records),
        )

    @property
    def retained(self) -> float | None:
        """Prompt tokens after pruning as a fraction of those before; None if no request was answered."""
        return self.prompt_tokens / self.prompt_tokens_full if self.prompt_tokens_full else None

    @property
    def requests_per_s(self) -> float:
        return self._per_s(self.answered)

    @property
    def output_tokens_per_s(self) -> float:
        return self._per_s(self.completion_tokens)

    @property
    def total_tokens_per_s(self) -> float:
        """Prompt tokens after pruning, and output tokens."""
        return self._per_s(self.prompt_tokens + self.completion_tokens)

    def _per_s(self, count: int) -> float:
        return count / self.wall_s if self.wall_s > 0 else 0.0


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _peak_tokens_per_s(records: Sequence[Record]) -> int:
    began_s = min((record.begun_s for record in records), default=0.0)
    seconds: Counter[int] = Counter()
    for record in records:
        for time_s, tokens in record.arrivals:
            seconds[int(time_s - began_s)] += tokens
    return max(seconds.values(), default=0)


def _peak_concurrent(records: Sequence[Record]) -> int:
    """One that ends when another begins is not concurrent with it."""
    changes = sorted([(each.begun_s, 1) for each in records] + [(each.done_s, -1) for each in records])
    return max(itertools.accumulate(change for _, change in changes), default=0)


def _failures(records: Iterable[Record]) -> tuple[Failures, ...]:
    found: dict[tuple[str, str], list[Failure]] = {}
    for failure in (record.failure for record in records if record.failure):
        found.setdefault((failure.status, failure.reason), []).append(failure)
    return tuple(
        Failures(status, reason, len(failures), failures[0].message) for (status, reason), failures in found.items()
    )


# --- JSON -------------------------------------------------------------------------------------------------------


def report_json(report: Report) -> dict[str, Any]:
    """The report for json.dumps; times in seconds, fractions between 0 and 1."""
    told = dataclasses.asdict(report)
    del told["pruning"]
    return {
        "pruning_rate": report.pruning.rate,
        "pruning_method": report.pruning.method,
        "pruning_threshold": report.pruning.threshold,
        **told,
        "failed": report.asked - report.answered,
        "retained": report.retained,
        "requests_per_s": report.requests_per_s,
        "output_tokens_per_s": report.output_tokens_per_s,
        "total_tokens_per_s": report.total_tokens_per_s,
    }


# --- text -------------------------------------------------------------------------------------------------------


def table(reports: Sequence[Report]) -> str:
    """The reports as text, with a column for each pruning: at most 88 columns wide for five, except for errors."""
    return "\n".join(_lines(reports))


def _named(pruning: Pruning) -> str:
    threshold = "" if pruning.threshold is None else f", threshold {pruning.threshold:g}"
    return NONE if pruning.method == NONE else f"rate {pruning.rate:g}, {pruning.method}{threshold}"


def _lines(reports: Sequence[Report]) -> Iterator[str]:
    for report in reports:
        for failures in report.failures:
            what = f"{failures.count} × {failures.status} {failures.reason}"
            yield f"{_named(report.pruning)}: {what}: {failures.example}"
    yield _row("Pruning rate:", [f"{report.pruning.rate:g}" for report in reports])
    for title, read, digits in _FIGURES:
        yield _row(title, [_number(read(report), digits) for report in reports])
    for title, name, read_distribution in _LATENCIES:
        yield f"--- {title}"
        found = [read_distribution(report) for report in reports]
        for column, word in _COLUMNS.items():
            values = [None if each is None else getattr(each, column) * 1e3 for each in found]
            yield _row(f"{word} {name} (ms):", [_number(value, 2) for value in values])
    yield "--- Tokens of a prompt (mean)"
    for title, tokens in _TOKENS:
        means = [tokens(each) / each.answered if each.answered else None for each in reports]
        yield _row(title, [_number(mean, 1) for mean in means])
    yield _row("Kept:", ["–" if each.retained is None else f"{each.retained:.1%}" for each in reports])
    if any(report.stages_s for report in reports):
        yield "--- Stages before the first token (median)"
        for stage in STAGES:
            values = [each.stages_s[stage] * 1e3 if each.stages_s else None for each in reports]
            yield _row(f"{stage.replace('_', ' ').capitalize()} (ms):", [_number(value, 1) for value in values])


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _row(name: str, values: Sequence[str]) -> str:
    return f"{name:<{_NAME_WIDTH}}" + "".join(f"{value:>10}" for value in values)


# The figures of `vllm bench serve`, by its names.
_FIGURES: tuple[tuple[str, Callable[[Report], float], int], ...] = (
    ("Successful requests:", lambda report: report.answered, 0),
    ("Failed requests:", lambda report: report.asked - report.answered, 0),
    ("Benchmark duration (s):", lambda report: report.wall_s, 2),
    ("Total input tokens:", lambda report: report.prompt_tokens, 0),
    ("Total generated tokens:", lambda report: report.completion_tokens, 0),
    ("Request throughput (req/s):", lambda report: report.requests_per_s, 2),
    ("Output token throughput (tok/s):", lambda report: report.output_tokens_per_s, 2),
    ("Peak output token throughput (tok/s):", lambda report: report.peak_output_tokens_per_s, 0),
    ("Peak concurrent requests:", lambda report: report.peak_concurrent_requests, 0),
    ("Total token throughput (tok/s):", lambda report: report.total_tokens_per_s, 2),
)
_LATENCIES: tuple[tuple[str, str, Callable[[Report], Distribution | None]], ...] = (
    ("Time to first token", "TTFT", lambda report: report.first_token_s),
    ("Time per output token after the first", "TPOT", lambda report: report.time_per_output_token_s),
    ("Time between tokens", "ITL", lambda report: report.token_gap_s),
    ("End to end", "E2EL", lambda report: report.total_s),
)
_TOKENS: tuple[tuple[str, Callable[[Report], int]], ...] = (
    ("Before pruning:", lambda report: report.prompt_tokens_full),
    ("After pruning:", lambda report: report.prompt_tokens),
    ("Cached:", lambda report: report.cached_prompt_tokens),
)
