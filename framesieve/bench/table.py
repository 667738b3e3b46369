"""How a load's report looks as text: rates one below the other, so that they can be compared.

Lines are at most 88 columns wide, but for error messages and the command.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from common.contract.retention import NONE, Pruning
from framesieve.bench.report import Distribution, Group, Report
from framesieve.client.answer import STAGES

_NAME_WIDTH = 28
_COLUMNS = ("mean", "p50", "p90", "p99", "max")
_STAGES_A_LINE = 5
_SHORT = {"wait_for_encoder": "→ encoder", "wait_for_prefill": "→ prefill"}


def table(report: Report) -> str:
    """The report as lines of text."""
    return "\n".join(_lines(report))


def named(pruning: Pruning) -> str:
    """A pruning's name in tables and pictures."""
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
    yield _row("tokens a request", ("unpruned", "prompt", "kept", "cached", "output"))
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
    """In two lines, for there are more of them than columns; → is waiting for one."""
    for first in range(0, len(STAGES), _STAGES_A_LINE):
        stages = STAGES[first : first + _STAGES_A_LINE]
        yield _row("median of each stage, s" if not first else "", [_SHORT.get(stage, stage) for stage in stages])
        for name, group in groups:
            yield _row(f"  {name}", [f"{group.stages_s[stage]:.3f}" if group.stages_s else "–" for stage in stages])


def _row(name: str, values: Sequence[str]) -> str:
    return f"{name:<{_NAME_WIDTH}}" + "".join(f"{value:>10}" for value in values)
