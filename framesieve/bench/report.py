"""What a load's records come to: distributions, throughput, errors; for each pruning and for all together.

It knows nothing of how questions were asked; how a report looks is `table`'s and `plot`'s.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from common.contract.retention import Pruning
from framesieve.bench.measure import Failure, Record


@dataclass(frozen=True, slots=True)
class Distribution:
    """Of n values: their mean, three percentiles and the greatest.

    Percentile q of sorted values v[0 … n − 1] is their linear interpolation at index q / 100 · (n − 1).
    """

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Distribution | None:
        """None where there are no values."""
        if not values:
            return None
        p50, p90, p99 = np.percentile(values, (50, 90, 99), method="linear").tolist()
        return cls(statistics.fmean(values), p50, p90, p99, max(values))


@dataclass(frozen=True, slots=True)
class Group:
    """Questions that belong together. Times, tokens and stages are those of the answered ones.

    first_token_s, total_s: from when a question was due; token_gap_s: pooled over the tokens of all answers.
    prompt_tokens: after pruning; cached_prompt_tokens of them were computed before. stages_s: medians, by name.
    held_s: mean time from arrival to the end of the answer, by the server's clock.
    kv_token_s: mean product of a request's tokens and the time that they lie in the KV cache, prefill and answer.
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
        """Prompt tokens after pruning, as a share of those before; None where nothing was answered."""
        return self.prompt_tokens / self.prompt_tokens_full if self.prompt_tokens_full else None


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


@dataclass(frozen=True, slots=True)
class Failures:
    """Questions that failed alike, and the first one's words."""

    status: str
    reason: str
    count: int
    example: str


@dataclass(frozen=True, slots=True)
class Report:
    """A whole load. wall_s: from its begin to its last answer, or to its interruption.

    late_s: how long after it was due a question was asked; this machine's own doing, not the server's.
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
        """After pruning."""
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
    """All of a report, ready for json.dumps; times in seconds, shares between 0 and 1."""
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
    """One question of a load, ready for json.dumps."""
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
