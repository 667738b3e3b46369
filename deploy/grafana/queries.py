"""PromQL, as the dashboard's panels ask it: of the instances that its variable names, over the interval it shows."""

from __future__ import annotations

JOBS = 'job=~"preprocessing|encoder|generation"'
INSTANCES = 'instance=~"$instance"'
INTERVAL = "$__rate_interval"


def of(metric: str, *matchers: str) -> str:
    """A metric's series that hold for `matchers`, in PromQL's own form: pool="decode"."""
    return f"{metric}{{{', '.join((*matchers, INSTANCES))}}}"


def rate(metric: str, *matchers: str) -> str:
    """How fast a counter rises, a second."""
    return f"rate({of(metric, *matchers)}[{INTERVAL}])"


def total(by: str, expression: str) -> str:
    """The sum over instances, for each value of the labels `by` (a, b)."""
    return f"sum by ({by}) ({expression})"


def oldest(by: str, expression: str) -> str:
    """The largest over instances, for each value of the labels `by`."""
    return f"max by ({by}) ({expression})"


def percentile(q: float, histogram: str, *matchers: str, by: str = "") -> str:
    """The q-quantile of what a histogram observed, for each value of the labels `by`."""
    buckets = total(", ".join(filter(None, (by, "le"))), rate(f"{histogram}_bucket", *matchers))
    return f"histogram_quantile({q:g}, {buckets})"


def mean(histogram: str, *matchers: str, by: str = "") -> str:
    """The mean of what a histogram observed, for each value of the labels `by`."""
    return share(total(by, rate(f"{histogram}_sum", *matchers)), total(by, rate(f"{histogram}_count", *matchers)))


def share(part: str, whole: str) -> str:
    """A quotient; nothing where there is no whole."""
    return f"{part} / ({whole} > 0)"
