"""A worker that sleeps instead of decoding, for as long as decoding would take on one core."""

from __future__ import annotations

import time
from collections.abc import Generator

import numpy as np

from gridsieve.services.preprocessing.video.cost import slice_costs
from gridsieve.services.preprocessing.video.slices import PlannedVideo
from gridsieve.services.preprocessing.workers import worker
from gridsieve.services.preprocessing.workers.indexes import index_of
from gridsieve.services.preprocessing.workers.jobs import sent_of
from gridsieve.services.preprocessing.workers.segments import GAINS
from gridsieve.services.preprocessing.workers.worker import Piece, Task

OPEN_S = 0.003


def sleeping_slices(task: Task) -> Generator[Piece, None, None]:
    """Slices of a video that are black, each after its cost by `video/cost.py`. Opening the file takes OPEN_S."""
    count, step = (task.facts.integer(name, 1, 2**31) for name in ("places", "slice_frames"))
    size_px, _, _ = sent_of(task.facts)
    places = tuple(task.numbers[:count].tolist())
    video = PlannedVideo(task.source, index_of(task.facts, task.numbers[count:]), places, step, size_px)
    costs, gain = slice_costs(video), GAINS[task.facts.integer("threads", 1, 8)]
    due_s = time.monotonic() + OPEN_S
    for number, continued_s in enumerate(costs.continued):
        taken_s = float(continued_s if number else costs.begun[0]) / gain
        due_s += taken_s
        if number < task.facts.integer("again", 0, 2**31):
            continue
        time.sleep(max(0.0, due_s - time.monotonic()))
        now_ns = time.monotonic_ns()
        facts = {"repaired_frames": 0, "decode_s": taken_s, "resize_s": 0.0, "decoded_ns": now_ns, "resized_ns": now_ns}
        yield Piece(facts, np.zeros(video.slice_shape(number), np.uint8))


def main() -> None:
    worker.main({"video_slices": sleeping_slices})
