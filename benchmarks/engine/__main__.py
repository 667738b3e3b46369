"""`make bench-engine`: the generation engine in this process, against transformers' `generate` and between settings.

Two checkpoints: the demo's, and a random one of about 60 M parameters. Distinct prompts of 830 tokens, 800 of them of a
video; 64 new tokens, end tokens ignored; greedy; float32 unless stated otherwise. Contenders alternate in every round,
so that other load on the machine affects all of them; medians over rounds, ratios within one run. Prints Markdown or
JSON to stdout and progress to stderr. A measurement is a function in `measures.py` and a line in MEASUREMENTS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from benchmarks.engine.measures import bfloat16, prefill, pruning, step, throughput
from benchmarks.models import Model, demo_and_random
from benchmarks.report import Beginning, options, report
from benchmarks.table import Row
from framesieve.common.telemetry.logs import configure_logging

MEASUREMENTS: Mapping[str, Callable[[Model, int], list[Row]]] = {
    "throughput": throughput,
    "pruning": pruning,
    "prefill": prefill,
    "step": step,
    "bfloat16": bfloat16,
}


def main() -> None:
    parser = options("engine", __doc__, MEASUREMENTS, rounds=3, least_rounds=1)
    parser.add_argument("--model", choices=["demo", "random"], action="append", help="on this one; may be repeated")
    args = parser.parse_args()
    configure_logging("benchmarks", "auto", "warning")  # to stderr
    beginning = Beginning.of("engine")
    rows: list[Row] = []
    with demo_and_random() as found:
        chosen = [model for model in found if model.name in (args.model or ["demo", "random"])]
        for name in args.only or MEASUREMENTS:
            for model in chosen:
                rows += MEASUREMENTS[name](model, args.rounds)
    parameters = ", ".join(f"{model.name} {model.parameters:,} parameters" for model in chosen)
    report(beginning, rows, args.json, models=parameters)


if __name__ == "__main__":
    main()
