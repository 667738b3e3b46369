"""`make bench-media`: the media path, from a file to pruned embeddings, against other implementations.

Contenders alternate in every round, so that other load on the machine affects all of them; medians over rounds, ratios
within one run. Prints Markdown or JSON to stdout and progress to stderr. A measurement is a function in its own file
(`media_*.py`) that takes a number of rounds and returns rows, and a line in MEASUREMENTS.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

from benchmarks.media_handover import handover
from benchmarks.media_hop import hop
from benchmarks.media_inline import inline
from benchmarks.media_memory import memory
from benchmarks.media_overlap import overlap
from benchmarks.media_pruning import pruning
from benchmarks.media_second_question import second_question
from benchmarks.media_seeking import seeking
from benchmarks.media_segments import segments
from benchmarks.media_sharing import sharing
from benchmarks.media_tensors import tensors
from benchmarks.media_throughput import throughput
from benchmarks.report import Beginning, options, report
from benchmarks.table import Row
from framesieve.common.telemetry.logs import configure_logging

MEASUREMENTS: Mapping[str, Callable[[int], list[Row]]] = {
    "tensors": tensors,
    "seeking": seeking,
    "segments": segments,
    "throughput": throughput,
    "sharing": sharing,
    "overlap": overlap,
    "second-question": second_question,
    "hop": hop,
    "handover": handover,
    "inline": inline,
    "pruning": pruning,
    "memory": memory,
}


def main() -> None:
    args = options(__doc__, MEASUREMENTS, rounds=7, least_rounds=5).parse_args()
    configure_logging("benchmarks", "auto", "warning")  # to stderr
    beginning = Beginning.of("media")
    rows: list[Row] = []
    for name in args.only or MEASUREMENTS:
        print(f"measuring {name}", file=sys.stderr)
        rows += MEASUREMENTS[name](args.rounds)
    report(beginning, rows, args.json)


if __name__ == "__main__":
    main()
