"""`make bench-engine`: the generation engine in this process, against transformers' `generate` and between settings.

Two checkpoints: the demo's, and a random one of about 60 M parameters. Distinct prompts of 830 tokens, 800 of them of a
video; 64 new tokens, end tokens ignored; greedy; float32 unless stated otherwise. `recurrent` has two checkpoints of
its own, whose layers keep a recurrent state, and prompts of text. Contenders alternate in every round, so that other
load on the machine affects all of them; medians over rounds, ratios within one run. Prints Markdown or JSON to stdout
and progress to stderr. A measurement is a function in `measures.py` and a line in MEASUREMENTS or WITH_STATES.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from benchmarks.engine.measures import bfloat16, prefill, pruning, recurrent, step, throughput
from benchmarks.models import Model, demo_and_random, with_states
from benchmarks.report import Beginning, options, report
from benchmarks.table import Row
from gridsieve.common.telemetry.logs import configure_logging

MEASUREMENTS: Mapping[str, Callable[[Model, int], list[Row]]] = {
    "throughput": throughput,
    "pruning": pruning,
    "prefill": prefill,
    "step": step,
    "bfloat16": bfloat16,
}
WITH_STATES: Mapping[str, Callable[[Model, int], list[Row]]] = {"recurrent": recurrent}
MODELS = ("demo", "random", "qwen3_5", "nemotron")


def main() -> None:
    parser = options("engine", __doc__, {**MEASUREMENTS, **WITH_STATES}, rounds=3, least_rounds=1)
    parser.add_argument("--model", choices=MODELS, action="append", help="on this one; may be repeated")
    args = parser.parse_args()
    configure_logging("benchmarks", "auto", "warning")  # to stderr
    beginning = Beginning.of("engine")
    rows: list[Row] = []
    parameters: list[str] = []
    for measurements, written in ((MEASUREMENTS, demo_and_random), (WITH_STATES, with_states)):
        names = [name for name in args.only or measurements if name in measurements]
        if not names:
            continue
        with written() as found:
            models = [model for model in found if model.name in (args.model or MODELS)]
            parameters += [f"{model.name} {model.parameters:,} parameters" for model in models]
            for name in names:
                rows += [row for model in models for row in measurements[name](model, args.rounds)]
    report(beginning, rows, args.json, models=", ".join(parameters))


if __name__ == "__main__":
    main()
