"""Aggregates the records of a load into distributions, throughput and errors, and formats them as JSON and text.

Every pruning has a group of its own beside the group of all requests. It knows nothing of how requests were sent.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from common.contract.retention import NONE, Pruning
from framesieve.bench.measure import Failure, Record
from framesieve.client.answer import STAGES

_NAME_WIDTH = 28
_COLUMNS = ("mean", "p50", "p90", "p99", "max")
_STAGES_A_LINE = 5
_SHORT = {"wait_for_encoder": "→ encoder", "wait_for_prefill": "→ prefill"}


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
class Group:
    """A group of requests. Latencies, tokens and stages are those of the answered ones.

    first_token_s, total_s: from when a request was due; token_gap_s: pooled over the tokens of all requests.
    prompt_tokens: after pruning; cached_prompt_tokens: how many of them were prefix cache hits.
    stages_s: medians, by stage.
    held_s: mean time from a request's arrival to the end of its completion, on the server's clock.
    kv_token_s: mean of a request's tokens times the seconds that they occupy the KV cache (prefill and decode).
    """

    asked: int
    answered: int
    first_token_s: Distribution | None
    token_gap_s: Distribution | None
    total_s: Distribution | None
    prompt_tokens_full: int
    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int
    stages_s: dict[str, float]
    held_s: float | None
    kv_token_s: float | None

    @classmethod
    def of(cls, records: Sequence[Record]) -> Group:
        answered = [record for record in records if record.failure is None]
        usages = [record.usage for record in answered if record.usage]
        costs = [(each.usage, each.timings) for each in answered if each.usage and each.timings]
        stages = [timings.stages_s for _, timings in costs]
        return cls(
            asked=len(records),
            answered=len(answered),
            first_token_s=Distribution.of([each.first_token_s for each in answered if each.first_token_s is not None]),
            token_gap_s=Distribution.of([gap for each in answered for gap in each.token_gaps_s]),
            total_s=Distribution.of([each.total_s for each in answered]),
            prompt_tokens_full=sum(usage.prompt_tokens_full for usage in usages),
            prompt_tokens=sum(usage.prompt_tokens for usage in usages),
            cached_prompt_tokens=sum(usage.cached_prompt_tokens for usage in usages),
            completion_tokens=sum(usage.completion_tokens for usage in usages),
            stages_s={name: statistics.median(each[name] for each in stages) for name in (stages[0] if stages else ())},
            held_s=_mean([timings.time_to_first_token_s + timings.generate_s for _, timings in costs]),
            kv_token_s=_mean(
                [
                    (usage.prompt_tokens + usage.completion_tokens) * (timings.prefill_s + timings.generate_s)
                    for usage, timings in costs
                ]
            ),
        )

    @property
    def retained(self) -> float | None:
        """Prompt tokens after pruning as a fraction of those before; None if no request was answered."""
        return self.prompt_tokens / self.prompt_tokens_full if self.prompt_tokens_full else None


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


@dataclass(frozen=True, slots=True)
class Failures:
    """Requests that failed with the same status and reason, and the message of the first."""

    status: str
    reason: str
    count: int
    example: str


@dataclass(frozen=True, slots=True)
class Report:
    """The report of a load.

    wall_s: from its start to its last completion, or to its interruption.
    late_s: delay between when a request was due and when it was sent; caused by this machine, not the server.
    """

    wall_s: float
    all: Group
    by_pruning: dict[Pruning, Group]
    failures: tuple[Failures, ...]
    late_s: Distribution | None

    @classmethod
    def of(cls, records: Sequence[Record], wall_s: float) -> Report:
        prunings = sorted({each.pruning for each in records}, key=lambda each: (each.method, each.rate))
        groups = {
            pruning: Group.of([record for record in records if record.pruning == pruning]) for pruning in prunings
        }
        late = Distribution.of([record.begun_s - record.due_s for record in records])
        return cls(wall_s, Group.of(records), groups, _failures(records), late)

    @property
    def requests_per_s(self) -> float:
        return self._per_s(self.all.answered)

    @property
    def output_tokens_per_s(self) -> float:
        return self._per_s(self.all.completion_tokens)

    @property
    def prompt_tokens_per_s(self) -> float:
        """Prompt tokens after pruning."""
        return self._per_s(self.all.prompt_tokens)

    def _per_s(self, count: int) -> float:
        return count / self.wall_s if self.wall_s > 0 else 0.0


def _failures(records: Iterable[Record]) -> tuple[Failures, ...]:
    alike: dict[tuple[str, str], list[Failure]] = {}
    for record in records:
        if record.failure is not None:
            alike.setdefault((record.failure.status, record.failure.reason), []).append(record.failure)
    found = [Failures(*key, len(failures), failures[0].message) for key, failures in alike.items()]
    return tuple(sorted(found, key=lambda each: -each.count))


# --- JSON -------------------------------------------------------------------------------------------------------


def report_json(report: Report) -> dict[str, Any]:
    """The report for json.dumps; times in seconds, fractions between 0 and 1."""
    return {
        "wall_s": report.wall_s,
        "requests_per_s": report.requests_per_s,
        "output_tokens_per_s": report.output_tokens_per_s,
        "prompt_tokens_per_s": report.prompt_tokens_per_s,
        "late_s": report.late_s and dataclasses.asdict(report.late_s),
        "all": _group_json(report.all),
        "by_pruning": [
            {"pruning_rate": pruning.rate, "method": pruning.method, **_group_json(group)}
            for pruning, group in report.by_pruning.items()
        ],
        "errors": [dataclasses.asdict(each) for each in report.failures],
    }


def record_json(record: Record) -> dict[str, Any]:
    """One record for json.dumps."""
    return {
        "number": record.number,
        "pruning_rate": record.pruning.rate,
        "method": record.pruning.method,
        "due_s": record.due_s,
        "begun_s": record.begun_s,
        "done_s": record.done_s,
        "first_token_s": record.first_token_s,
        "total_s": record.total_s,
        "token_gaps_s": record.token_gaps_s,
        "prompt_tokens_full": record.usage and record.usage.prompt_tokens_full,
        "prompt_tokens": record.usage and record.usage.prompt_tokens,
        "cached_prompt_tokens": record.usage and record.usage.cached_prompt_tokens,
        "completion_tokens": record.usage and record.usage.completion_tokens,
        "timings": record.timings and dataclasses.asdict(record.timings),
        "error": record.failure and dataclasses.asdict(record.failure),
    }


def _group_json(group: Group) -> dict[str, Any]:
    return {**dataclasses.asdict(group), "failed": group.asked - group.answered, "retained": group.retained}


# --- text -------------------------------------------------------------------------------------------------------


def table(report: Report) -> str:
    """The report as text, with one line for each pruning, at most 88 columns wide except for error messages."""
    return "\n".join(_lines(report))


def named(pruning: Pruning) -> str:
    """A pruning's name in tables and plots."""
    return NONE if pruning.method == NONE else f"rate {pruning.rate:g}, {pruning.method}"


def _lines(report: Report) -> Iterator[str]:
    failed = report.all.asked - report.all.answered
    yield f"{report.all.answered} answered, {failed} failed in {report.wall_s:.2f} s"
    yield (
        f"{report.requests_per_s:.2f} requests/s · {report.output_tokens_per_s:.1f} output tokens/s · "
        f"{report.prompt_tokens_per_s:.1f} prompt tokens/s"
    )
    for failures in report.failures:
        yield f"  {failures.count} × {failures.status} {failures.reason}: {failures.example}"
    if not report.all.answered:
        return
    groups = [(named(pruning), group) for pruning, group in report.by_pruning.items()]
    if len(groups) > 1:
        groups.append(("all", report.all))
    yield ""
    yield from _latencies("time to first token, s", groups, lambda group: group.first_token_s, 1, 3)
    yield from _latencies("between tokens, ms", groups, lambda group: group.token_gap_s, 1000, 2)
    yield from _latencies("end to end, s", groups, lambda group: group.total_s, 1, 3)
    yield from _tokens(groups)
    yield from _stages(groups)


def _latencies(
    title: str,
    groups: Sequence[tuple[str, Group]],
    read: Callable[[Group], Distribution | None],
    scale: float,
    digits: int,
) -> Iterator[str]:
    yield _row(title, _COLUMNS)
    for name, group in groups:
        found = read(group)
        values = [getattr(found, column) * scale for column in _COLUMNS] if found else []
        yield _row(f"  {name}", [f"{value:.{digits}f}" for value in values] or ["–"] * len(_COLUMNS))
    yield ""


def _tokens(groups: Sequence[tuple[str, Group]]) -> Iterator[str]:
    yield _row("tokens per request", ("unpruned", "prompt", "kept", "cached", "output"))
    for name, group in groups:
        count = max(group.answered, 1)
        yield _row(
            f"  {name}",
            (
                f"{group.prompt_tokens_full / count:.1f}",
                f"{group.prompt_tokens / count:.1f}",
                "–" if group.retained is None else f"{group.retained:.1%}",
                f"{group.cached_prompt_tokens / count:.1f}",
                f"{group.completion_tokens / count:.1f}",
            ),
        )
    yield ""


def _stages(groups: Sequence[tuple[str, Group]]) -> Iterator[str]:
    """Two lines per group, since there are more stages than columns; "→ x" is waiting for x."""
    for first in range(0, len(STAGES), _STAGES_A_LINE):
        stages = STAGES[first : first + _STAGES_A_LINE]
        yield _row("median of each stage, s" if not first else "", [_SHORT.get(stage, stage) for stage in stages])
        for name, group in groups:
            yield _row(f"  {name}", [f"{group.stages_s[stage]:.3f}" if group.stages_s else "–" for stage in stages])


def _row(name: str, values: Sequence[str]) -> str:
    return f"{name:<{_NAME_WIDTH}}" + "".join(f"{value:>10}" for value in values)
