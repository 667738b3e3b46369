"""Reports of a load: percentiles, throughput, groups, errors; and their text and JSON."""

from __future__ import annotations

import pytest

from gridsieve.bench.measure import Failure, Record
from gridsieve.bench.report import Report, report_json, table
from gridsieve.client.answer import Timings, Usage
from gridsieve.client.prompt import Pruning

PLAIN, PRUNED = Pruning(0.0, "evs"), Pruning(0.75, "evs")
TIMINGS = Timings(1.0, 0.0, 0.1, 0.2, 0.0, 0.1, 0.2, 0.0, 0.1, 0.1, 0.2, generate_s=0.5)


def answered(number: int, *, due_s: float, first_s: float, total_s: float, kept: int) -> Record:
    """Three tokens: the first, one in the middle of the time that is left, and the last at the end."""
    usage = Usage(prompt_tokens_full=100, prompt_tokens=kept, completion_tokens=3, media=())
    times = (due_s + first_s, due_s + (first_s + total_s) / 2, due_s + total_s)
    arrivals = tuple((time_s, 1) for time_s in times)
    return Record(number, PRUNED, due_s, due_s + 0.01, due_s + total_s, arrivals, usage, TIMINGS)


def failed(number: int, status: str, reason: str, message: str) -> Record:
    return Record(number, PRUNED, 0.0, 0.0, 0.1, failure=Failure(status, reason, message))


RECORDS = [
    answered(0, due_s=0.0, first_s=1.0, total_s=2.0, kept=40),
    answered(1, due_s=0.0, first_s=0.4, total_s=1.0, kept=28),
    answered(2, due_s=1.0, first_s=3.0, total_s=4.0, kept=40),
    answered(3, due_s=2.0, first_s=0.6, total_s=2.0, kept=32),
    failed(4, "INVALID_ARGUMENT", "MEDIA_REJECTED", "no video"),
    failed(5, "RESOURCE_EXHAUSTED", "OVERLOADED", "the queue is full"),
    failed(6, "INVALID_ARGUMENT", "MEDIA_REJECTED", "no picture"),
]


def test_a_report_counts_answered_requests_and_errors_by_reason_with_their_first_message() -> None:
    report = Report.of(PRUNED, RECORDS, wall_s=8.0)
    assert (report.asked, report.answered) == (7, 4)
    assert report.requests_per_s == 4 / 8
    assert report.output_tokens_per_s == 4 * 3 / 8
    assert report.total_tokens_per_s == (40 + 28 + 40 + 32 + 4 * 3) / 8
    assert report.retained == pytest.approx(140 / 400)
    assert report.stages_s["decode"] == 0.2
    assert report.first_token_s is not None
    assert report.total_s is not None
    assert report.token_gap_s is not None
    assert report.time_per_output_token_s is not None
    assert report.first_token_s.mean == pytest.approx((1.0 + 0.4 + 3.0 + 0.6) / 4)
    assert (report.total_s.p50, report.total_s.max) == pytest.approx((2.0, 4.0))
    gaps = (0.5, 0.3, 0.5, 0.7)  # each request has two of one length
    assert report.token_gap_s.mean == pytest.approx(sum(gaps) / 4)
    assert report.time_per_output_token_s.max == pytest.approx(max(gaps))
    assert list(report_json(report)["failures"]) == [
        {"status": "INVALID_ARGUMENT", "reason": "MEDIA_REJECTED", "count": 2, "example": "no video"},
        {"status": "RESOURCE_EXHAUSTED", "reason": "OVERLOADED", "count": 1, "example": "the queue is full"},
    ]


def test_peaks_are_of_one_second_and_of_one_time() -> None:
    report = Report.of(PRUNED, RECORDS, wall_s=8.0)
    # Seconds since the first request was sent, at 0.01. Tokens at 0.4, 0.7, 1, 1 | 1.5, 2 | 2.6 | 3.3, 4, 4 | 4.5, 5.
    assert report.peak_output_tokens_per_s == 4
    # [0.01, 2), [0.01, 1), [1.01, 5), [2.01, 4): one of the first two or four is over when the next begins.
    assert report.peak_concurrent_requests == 2
    back_to_back = [Record(0, PLAIN, 0, 0, 1, usage=RECORDS[0].usage), Record(1, PLAIN, 1, 1, 2)]
    assert Report.of(PLAIN, back_to_back, wall_s=2.0).peak_concurrent_requests == 1


def test_the_table_has_one_column_per_rate() -> None:
    reports = [Report.of(PLAIN, RECORDS[:2], wall_s=2.0), Report.of(PRUNED, RECORDS, wall_s=8.0)]
    lines = table(reports).splitlines()
    assert lines[0] == "rate 0.75, evs: 2 × INVALID_ARGUMENT MEDIA_REJECTED: no video"
    rows = {name: rest.split() for name, _, rest in (line.partition(":") for line in lines[2:])}
    assert rows["Pruning rate"] == ["0", "0.75"]
    assert rows["Successful requests"] == ["2", "4"]
    assert rows["Failed requests"] == ["0", "3"]
    assert rows["Total input tokens"] == ["68", "140"]
    assert rows["Output token throughput (tok/s)"] == ["3.00", "1.50"]
    assert rows["Mean TTFT (ms)"] == ["700.00", "1250.00"]
    assert rows["Median E2EL (ms)"] == ["1500.00", "2000.00"]
    assert rows["Kept"] == ["34.0%", "35.0%"]
    assert max(map(len, table(reports[:1] * 5).splitlines())) == 88


def test_reports_of_errors_alone_and_of_nothing() -> None:
    only_errors = Report.of(PLAIN, RECORDS[4:], wall_s=1.0)
    assert report_json(only_errors)["first_token_s"] is None
    nothing = Report.of(PLAIN, [], wall_s=0.0)
    assert report_json(nothing)["requests_per_s"] == 0
    for report, failures in ((only_errors, "3"), (nothing, "0")):
        rows = [line.split() for line in table([report]).splitlines()]
        assert ["Failed", "requests:", failures] in rows
        assert ["Mean", "TTFT", "(ms):", "–"] in rows
