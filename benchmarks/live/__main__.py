"""`make bench-live`: live sessions by three real processes.

Prints Markdown or JSON to stdout and progress to stderr. A measurement is a function in a file of its own that takes a
number of rounds and returns rows, and a line in MEASUREMENTS, or in LONG, which are measured where --only names them.
Memory over an hour is measured by `make soak-live`.
"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.live.age import age
from benchmarks.live.change import change_rules, out_of_the_dark
from benchmarks.live.question import question
from benchmarks.live.sessions import sessions
from benchmarks.live.still import still_slice
from benchmarks.live.streams import all_streams, streams
from benchmarks.report import Measurement, run

MEASUREMENTS: Mapping[str, Measurement] = {
    "question": question,
    "age": age,
    "sessions": sessions,
    "still": still_slice,
    "streams": streams,
    "change": change_rules,
    "dark": out_of_the_dark,
}
LONG: Mapping[str, Measurement] = {"all-streams": all_streams}

if __name__ == "__main__":
    run("live", __doc__, MEASUREMENTS, rounds=7, least_rounds=5, long=LONG)
