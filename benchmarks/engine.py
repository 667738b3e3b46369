"""`make bench-engine`: the engine by itself, in this process, against transformers' `generate` and against itself.

Two checkpoints: the demo's, and a random one of about 60 M parameters. Prompts of 830 tokens, 800 of them a video's,
no two alike; 64 new tokens, end tokens ignored; greedy; float32 unless said otherwise. Contenders take turns round by
round, so that what else the machine does is shared by all; medians over rounds, ratios within one run. Prints Markdown,
or JSON, to stdout and progress to stderr. A measurement is a function in `engine_measures.py` and a line in
MEASUREMENTS; `engine_services.py` asks the three services.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict

import services.generation  # noqa: F401  (how OpenMP's threads wait is set before torch loads)
from benchmarks.engine_measures import bfloat16, prefill, pruning, step, throughput
from benchmarks.engine_models import Model, models
from benchmarks.engine_services import through_services
from benchmarks.media_table import Row, table
from benchmarks.timing import machine

MEASUREMENTS: Mapping[str, Callable[[Model, int], list[Row]]] = {
    "throughput": throughput,
    "pruning": pruning,
    "prefill": prefill,
    "step": step,
    "bfloat16": bfloat16,
    "services": through_services,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=list(MEASUREMENTS), action="append", help="measure this; may be repeated")
    parser.add_argument("--model", choices=["demo", "random"], action="append", help="on this one; may be repeated")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {args.rounds}")
    command = f"python -m benchmarks.engine{''.join(f' {each}' for each in sys.argv[1:])}"
    header = {"command": command, "date": str(datetime.datetime.now(datetime.UTC).date()), "machine": machine()}
    rows: list[Row] = []
    with models() as found:
        chosen = [model for model in found if model.name in (args.model or ["demo", "random"])]
        header["models"] = ", ".join(f"{model.name} {model.parameters:,} parameters" for model in chosen)
        for name in args.only or MEASUREMENTS:
            for model in chosen:
                rows += MEASUREMENTS[name](model, args.rounds)
    if args.json:
        measured = [asdict(row) | {"ratio": row.ratio, "met": row.met} for row in rows]
        print(json.dumps(header | {"rows": measured}, ensure_ascii=False, indent=2))
    else:
        print(f"`{command}`\n{header['date']}, {header['machine']}; {header['models']}\n")
        print(*table(rows), sep="\n")


if __name__ == "__main__":
    main()
