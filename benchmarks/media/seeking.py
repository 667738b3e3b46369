"""Few frames of a long clip: our decoder against decoding everything and against seeking to each frame."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

import av
import numpy as np

from benchmarks.clips import RATE, clip
from benchmarks.table import Row, Timings
from gridsieve.services.preprocessing.sources.source import bytes_source
from gridsieve.services.preprocessing.video.decode import decode_frames
from gridsieve.services.preprocessing.video.packets import read_packets

CLIP_FRAMES = 900
HEIGHT_PX, WIDTH_PX = 360, 640
KEYFRAMES_EVERY = (60, 250)
WANTED = (16, 120)
MOST = 1.15


def ours(data: bytes, places: Sequence[int]) -> int:
    """Our decoder, including reading the packet index, which planning needs."""
    source = bytes_source("clip", data)
    return sum(int(frame.pixels[0, 0, 0]) for frame in decode_frames(source, read_packets(source), places))


def decode_all(data: bytes, places: Sequence[int]) -> int:
    """Decodes up to the last wanted frame, as transformers does with PyAV; converts only wanted frames to RGB."""
    wanted, found = set(places), 0
    with av.open(io.BytesIO(data), "r") as container:
        container.streams.video[0].thread_type = "AUTO"
        for number, frame in enumerate(container.decode(video=0)):
            if number in wanted:
                found += int(frame.to_ndarray(format="rgb24")[0, 0, 0])
            if number == places[-1]:
                break
    return found


def seek_each(data: bytes, places: Sequence[int]) -> int:
    """Seeks to the keyframe before each wanted frame and decodes from there."""
    found = 0
    with av.open(io.BytesIO(data), "r") as container:
        stream = container.streams.video[0]
        stream.thread_type = "AUTO"
        assert stream.time_base is not None
        for place in places:
            wanted = round(Fraction(place, RATE) / stream.time_base)
            container.seek(wanted, stream=stream)
            for frame in container.decode(stream):
                if frame.pts is not None and frame.pts >= wanted:
                    found += int(frame.to_ndarray(format="rgb24")[0, 0, 0])
                    break
    return found


CONTENDERS: Mapping[str, Callable[[bytes, Sequence[int]], int]] = {
    "ours": ours,
    "decode all": decode_all,
    "seek each": seek_each,
}


def seeking(rounds: int) -> list[Row]:
    """Seconds from a clip's bytes to RGB frames; on a busy machine, processor time is more reliable."""
    rows = []
    for every in KEYFRAMES_EVERY:
        data = clip(CLIP_FRAMES, HEIGHT_PX, WIDTH_PX, every)
        for frames in WANTED:
            places = np.linspace(0, CLIP_FRAMES - 1, frames).round().astype(int).tolist()
            timings, cpu = Timings(), Timings()
            answers = set()
            for _ in range(rounds):
                for name, contender in CONTENDERS.items():
                    start, cpu_start = time.perf_counter(), time.process_time()
                    answers.add(contender(data, places))
                    timings.add(name, time.perf_counter() - start)
                    cpu.add(name, time.process_time() - cpu_start)
            assert len(answers) == 1, "the contenders decoded different frames"
            what = f"{frames} of {CLIP_FRAMES} frames, {WIDTH_PX}×{HEIGHT_PX}, a keyframe every {every}"
            for name, taken, goal in ((what, timings, MOST), ("the same, processor time", cpu, None)):
                best = min(("decode all", "seek each"), key=taken.median)
                rows.append(Row(name, best, taken.median("ours"), taken.median(best), "s", at_most=goal))
    return rows
