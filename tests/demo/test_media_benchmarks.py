"""What the media benchmarks compute of what they measure, and how they print it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from benchmarks.media_clips import another_file, another_path, clip
from benchmarks.media_memory import early_and_late
from benchmarks.media_processes import cpu_s, resident_bytes, tree
from benchmarks.table import Row, Timings, table
from services.preprocessing.sources.source import bytes_source
from services.preprocessing.video.packets import read_packets

# A child with a child of its own, which takes 64 MiB and a fifth of a second of processor time, says so, and waits.
COSTLY = """
import time
held, start = b"1" * 2**26, time.process_time()
while time.process_time() - start < 0.2:
    pass
print(flush=True)
input()
"""
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {COSTLY!r}])"


def test_a_goal_is_met_up_to_its_very_edge() -> None:
    assert Row("", "", 3, 2, "s", at_least=1.5).met is True
    assert Row("", "", 3, 2, "s", at_most=1.5).met is True
    assert Row("", "", 2.9, 2, "s", at_least=1.5).met is False
    assert Row("", "", 3.1, 2, "s", at_most=1.5).met is False
    assert Row("", "", 3, 2, "s").met is None


def test_the_table_gives_units_goals_and_notes_below() -> None:
    rows = [
        Row("hop", "bare", 3 * 2**20, 4 * 2**20, "bytes/s", at_least=0.9, note="busy"),
        Row("question", "first", 0.012, 0.1, "s", at_most=0.15),
        Row("videos", "turn", 1.5, 1, "1/s"),
    ]
    assert table(rows)[2:] == [
        "| hop | 3 MiB/s | bare | 4 MiB/s | 0.75 | ≥ 0.9 | no |",
        "| question | 12 ms | first | 100 ms | 0.12 | ≤ 0.15 | yes |",
        "| videos | 1.5 1/s | turn | 1 1/s | 1.5 |  |  |",
        "",
        "- hop: busy",
    ]
    assert len(table(rows[1:])) == 4


def test_medians_are_taken_by_contender() -> None:
    taken = Timings()
    for value in (5.0, 1.0, 2.0):
        taken.add("ours", value)
        taken.add("theirs", 10 * value)
    assert (taken.median("ours"), taken.median("theirs")) == (2, 20)


def test_memory_is_compared_after_the_warm_up_with_the_end() -> None:
    samples = [0] * 50 + [100] * 50 + [10**9] * 50 + [105] * 49 + [10**9]
    assert early_and_late(samples) == (100, 105)


def test_what_a_process_costs_counts_with_what_it_started() -> None:
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert len(list(tree(process.pid))) == 2
        resident = resident_bytes(process.pid)
        assert 2**26 < resident < 2**26 + 2**26
        assert 0.2 <= cpu_s(process.pid) < 1
        process.communicate(b"\n")
    deadline_s = time.monotonic() + 5
    while resident_bytes(process.pid) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert (resident_bytes(process.pid), cpu_s(process.pid)) == (0, 0)


def test_another_file_is_the_same_clip_in_other_bytes(tmp_path: Path) -> None:
    data = clip(9, 64, 96, keyframe_every=3)
    first, second = another_file(data), (tmp_path / another_path(tmp_path, data)).read_bytes()
    assert len({data, first, second}) == 3
    indices = [read_packets(bytes_source("clip", each)) for each in (data, first, second)]
    assert indices[0] == indices[1] == indices[2]
    assert len(indices[0].keyframes) == 3
