"""`make bench-media`: the media path, from a file to pruned embeddings, against other implementations.

Contenders alternate in every round, so that other load on the machine affects all of them; medians over rounds, ratios
within one run. Prints Markdown or JSON to stdout and progress to stderr. A measurement is a function in a file of
its own that takes a number of rounds and returns rows, and a line in MEASUREMENTS.
"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.media.films import films
from benchmarks.media.inline import inline
from benchmarks.media.pruning import pruning
from benchmarks.media.second_question import second_question
from benchmarks.media.segments import pool, segments
from benchmarks.media.tensors import tensors
from benchmarks.report import Measurement, run

MEASUREMENTS: Mapping[str, Measurement] = {
    "tensors": tensors,
    "segments": segments,
    "pool": pool,
    "second-question": second_question,
    "inline": inline,
    "pruning": pruning,
    "films": films,
}

if __name__ == "__main__":
    run("media", __doc__, MEASUREMENTS, rounds=7, least_rounds=5)
