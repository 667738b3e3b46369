"""Reports of a load: percentiles, throughput, groups, errors; and their text, JSON and plot."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.contract.retention import Pruning
from framesieve.bench.measure import Failure, Record, token_gaps
from framesieve.bench.report import Distribution, Report, report_json, table
from framesieve.client.answer import Timings, Usage

PLAIN, PRUNED = Pruning(0.0), Pruning(0.75)
TIMINGS = Timings(1.0, 0.0, 0.1, 0.2, 0.0, 0.1, 0.2, 0.0, 0.1, 0.1, 0.2, generate_s=0.5)


def answered(number: int, pruning: Pruning, *, due_s: float, first_s: float, total_s: float, kept: int) -> Record:
    usage = Usage(prompt_tokens_full=100, prompt_tokens=kept, completion_tokens=3, media=())
    gap = (total_s - first_s) / 2
    return Record(number, pruning, due_s, due_s + 0.01, due_s + total_s, first_s, (gap, gap), usage, TIMINGS)


def failed(number: int, status: str, reason: str, message: str) -> Record:
    return Record(number, PLAIN, 0.0, 0.0, 0.1, failure=Failure(status, reason, message))


RECORDS = [
    answered(0, PLAIN, due_s=0.0, first_s=1.0, total_s=2.0, kept=100),
    answered(1, PRUNED, due_s=0.0, first_s=0.4, total_s=1.0, kept=28),
    answered(2, PLAIN, due_s=1.0, first_s=3.0, total_s=4.0, kept=100),
    answered(3, PRUNED, due_s=2.0, first_s=0.6, total_s=2.0, kept=32),
    failed(4, "INVALID_ARGUMENT", "MEDIA_REJECTED", "no video"),
    failed(5, "RESOURCE_EXHAUSTED", "OVERLOADED", "the queue is full"),
    failed(6, "INVALID_ARGUMENT", "MEDIA_REJECTED", "no picture"),
]


@settings(max_examples=30)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=300))
def test_percentiles_are_interpolated_linearly(values: list[float]) -> None:
    found = Distribution.of(values)
    assert found is not None
    ordered = sorted(values)
    for q, value in ((50, found.p50), (90, found.p90), (99, found.p99)):
        at = q / 100 * (len(values) - 1)
        low, high = ordered[math.floor(at)], ordered[math.ceil(at)]
        assert value == pytest.approx(low + (high - low) * (at - math.floor(at)), abs=1e-6)
    assert Distribution.of([]) is None
    assert found.max == ordered[-1]
    assert found.mean == pytest.approx(sum(values) / len(values))


def test_tokens_of_a_message_share_the_time_since_the_previous_message() -> None:
    assert token_gaps([(1.0, 2), (1.5, 1), (2.1, 3)]) == pytest.approx((0.5, 0.2, 0.2, 0.2))
    assert token_gaps([(1.0, 4)]) == token_gaps([]) == ()


def test_a_report_counts_answered_requests_and_errors_by_reason_with_their_first_message() -> None:
    report = Report.of(RECORDS, wall_s=8.0)
    assert (report.all.asked, report.all.answered) == (7, 4)
    assert report.requests_per_s == 4 / 8
    assert report.output_tokens_per_s == 4 * 3 / 8
    assert report.prompt_tokens_per_s == (100 + 28 + 100 + 32) / 8
    assert report.all.retained == pytest.approx(260 / 400)
    assert report.all.stages_s["decode"] == 0.2
    assert report_json(report)["errors"] == [
        {"status": "INVALID_ARGUMENT", "reason": "MEDIA_REJECTED", "count": 2, "example": "no video"},
        {"status": "RESOURCE_EXHAUSTED", "reason": "OVERLOADED", "count": 1, "example": "the queue is full"},
    ]


def test_each_pruning_has_its_own_group() -> None:
    told = report_json(Report.of(RECORDS, wall_s=8.0))["by_pruning"]
    assert [(each["pruning_rate"], each["asked"], each["answered"]) for each in told] == [(0.0, 5, 2), (0.75, 2, 2)]
    assert [each["first_token_s"]["mean"] for each in told] == pytest.approx([2.0, 0.5])
    assert (told[1]["total_s"]["p50"], told[1]["total_s"]["max"]) == pytest.approx((1.5, 2.0))
    assert told[1]["token_gap_s"]["mean"] == pytest.approx((0.3 + 0.3 + 0.7 + 0.7) / 4)
    assert told[1]["retained"] == pytest.approx(0.3)


def test_the_table_has_one_line_per_rate() -> None:
    lines = table(Report.of(RECORDS, wall_s=8.0)).splitlines()
    assert lines[0] == "4 answered, 3 failed in 8.00 s"
    assert lines[1] == "0.50 requests/s · 1.5 output tokens/s · 32.5 prompt tokens/s"
    assert "  2 × INVALID_ARGUMENT MEDIA_REJECTED: no video" in lines
    at = lines.index("time to first token, s            mean       p50       p90       p99       max")
    assert lines[at + 1].split() == ["rate", "0,", "evs", "2.000", "2.000", "2.800", "2.980", "3.000"]
    assert max(map(len, lines)) <= 88


def test_reports_of_errors_alone_and_of_nothing() -> None:
    only_errors = Report.of(RECORDS[4:], wall_s=1.0)
    assert table(only_errors).splitlines()[0] == "0 answered, 3 failed in 1.00 s"
    assert report_json(only_errors)["all"]["first_token_s"] is None
    nothing = Report.of([], wall_s=0.0)
    assert report_json(nothing)["requests_per_s"] == 0
    assert table(nothing).startswith("0 answered, 0 failed")
