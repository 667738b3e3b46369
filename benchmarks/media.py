"""`make bench-media`: the media path, from a file to pruned embeddings, against other ways to do the same.

Contenders take turns round by round, so that what else the machine does is shared by all; medians over rounds, ratios
within one run. Prints Markdown, or JSON, to stdout and progress to stderr. A measurement is a function in a file of its
own (`media_*.py`) that takes a number of rounds and returns rows, and a line in MEASUREMENTS.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict

from benchmarks.media_hop import hop
from benchmarks.media_memory import memory
from benchmarks.media_overlap import overlap
from benchmarks.media_pruning import pruning
from benchmarks.media_second_question import second_question
from benchmarks.media_seeking import seeking
from benchmarks.media_sharing import sharing
from benchmarks.media_table import Row, table
from benchmarks.media_tensors import tensors
from benchmarks.media_throughput import throughput
from benchmarks.timing import machine

MEASUREMENTS: Mapping[str, Callable[[int], list[Row]]] = {
    "tensors": tensors,
    "seeking": seeking,
    "throughput": throughput,
    "sharing": sharing,
    "overlap": overlap,
    "second-question": second_question,
    "hop": hop,
    "pruning": pruning,
    "memory": memory,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", choices=list(MEASUREMENTS), action="append", help="measure this; may be repeated")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.rounds < 5:
        parser.error(f"--rounds must be at least 5, got {args.rounds}")
    command = f"python -m benchmarks.media{''.join(f' {each}' for each in sys.argv[1:])}"
    header = {"command": command, "date": str(datetime.datetime.now(datetime.UTC).date()), "machine": machine()}
    rows: list[Row] = []
    for name in args.only or MEASUREMENTS:
        print(f"measuring {name}", file=sys.stderr)
        rows += MEASUREMENTS[name](args.rounds)
    if args.json:
        found = [asdict(row) | {"ratio": row.ratio, "met": row.met} for row in rows]
        print(json.dumps(header | {"rows": found}, ensure_ascii=False, indent=2))
    else:
        print(f"`{header['command']}`\n{header['date']}, {header['machine']}\n")
        print(*table(rows), sep="\n")


if __name__ == "__main__":
    main()
