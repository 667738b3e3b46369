"""Builds the dashboard's PromQL: restricted to the selected instances, over Grafana's rate interval."""

from __future__ import annotations

JOBS = 'job=~"preprocessing|encoder|generation"'
INSTANCES = 'instance=~"$instance"'
INTERVAL = "$__rate_interval"


def of(metric: str, *matchers: str) -> str:
    """A selector of a metric's series, with further matchers in PromQL: pool="decode"."""
    return f"{metric}{{{', '.join((*matchers, INSTANCES))}}}"


def rate(metric: str, *matchers: str) -> str:
    """The increase of a counter per second."""
    return f"rate({of(metric, *matchers)}[{INTERVAL}])"


def total(by: str, expression: str) -> str:
    """The sum over instances, for each value of the labels `by` (a, b)."""
    return f"sum by ({by}) ({expression})"


def oldest(by: str, expression: str) -> str:
    """The maximum over instances, for each value of the labels `by`."""
    return f"max by ({by}) ({expression})"


def percentile(q: float, histogram: str, *matchers: str, by: str = "") -> str:
    """The q-quantile of a histogram, for each value of the labels `by`."""
    buckets = total(", ".join(filter(None, (by, "le"))), rate(f"{histogram}_bucket", *matchers))
    return f"histogram_quantile({q:g}, {buckets})"


def mean(histogram: str, *matchers: str, by: str = "") -> str:
    """The mean of a histogram, for each value of the labels `by`."""
    return share(total(by, rate(f"{histogram}_sum", *matchers)), total(by, rate(f"{histogram}_count", *matchers)))


def share(part: str, whole: str) -> str:
    """part / whole; no series if whole is 0."""
    return f"{part} / ({whole} > 0)"
