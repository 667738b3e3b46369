"""A call of `python -m benchmarks.gpu`: its parts one after another within its time, and its rows in two files."""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import torch

from benchmarks.gpu import device as of_device
from benchmarks.gpu.device import Peaks, wait
from benchmarks.gpu.targets import Target
from benchmarks.report import Beginning, markdown
from benchmarks.table import Row

# A part is not begun in the last seconds.
PART_S = 20
LONGEST_KERNELS = 20

ROOFLINE, GENERATE = "the roofline", "`generate`"

Part: TypeAlias = Callable[[], Iterator[Row]]


class Call:
    """One call. It ends `limit_s` after it was made.

    rows: measured so far. failures: of parts that raised. made: what `close` undoes.
    """

    def __init__(
        self, name: str, target: Target, target_name: str, device: torch.device, limit_s: float, folder: Path
    ) -> None:
        self.target, self.device = target, device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.rows: list[Row] = []
        self.failures: list[str] = []
        self.made = ExitStack()
        self._skipped: list[str] = []
        self._part = ""
        self._began_s, self._limit_s = time.monotonic(), limit_s
        self._beginning = Beginning.of("gpu")
        self._about = {
            "device": of_device.about(device),
            "target": target_name,
            "limit": f"at most {limit_s:g} s",
        }
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / f"gpu-{name}-{of_device.card(device)}"
        self._lines = self.made.enter_context(self.file.with_suffix(".jsonl").open("w", encoding="utf-8"))
        self._write(**asdict(self._beginning), **self._about)

    def close(self) -> None:
        self.made.close()

    @cached_property
    def peaks(self) -> Peaks:
        """Of the device, measured when first asked for."""
        peaks = Peaks.measured(self.device, self.dtype, self.target.side, self.target.copied_bytes)
        self._about["peaks"] = str(peaks)
        self._write(**asdict(peaks))
        return peaks

    @property
    def left_s(self) -> float:
        """Seconds until the call ends."""
        return self._limit_s - (time.monotonic() - self._began_s)

    def fits(self, what: str, needs_s: float) -> bool:
        """Whether there is time for something that may need so many seconds; if not, it is skipped."""
        if needs_s < self.left_s:
            return True
        self.skip(what, f"it may need {needs_s:.0f} s, {max(0, self.left_s):.0f} s are left")
        return False

    def skip(self, what: str, why: str) -> None:
        """Names something that is not measured."""
        self._skipped.append(f"{what} is not measured: {why}")
        self._write(part=self._part, skipped=what, why=why)
        self._progress(self._skipped[-1])

    def run(self, name: str, part: Part) -> None:
        """Writes each row of a part as it comes. An exception ends the part alone."""
        self._part = name
        if not self.fits(name, PART_S):
            return
        self._write(part=name, began_s=self._limit_s - self.left_s)
        of_device.give_back(self.device)
        try:
            for row in part():
                self.rows.append(row)
                self._write(part=name, **asdict(row), ratio=row.ratio, met=row.met)
                self._progress(f"{row.what}: {row.ours:.4g} {row.unit}, {row.ratio:.3g} of {row.against}")
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            self.failures.append(f"{name} failed: {type(error).__name__}: {error}")
            self._write(part=name, failed=self.failures[-1])
        self._write(part=name, ended_s=self._limit_s - self.left_s)

    def markdown(self) -> str:
        """All rows so far as a table, and what is missing."""
        table = markdown(self._beginning, self.rows, **self._about)
        missing = [f"- {' '.join(each.split())}" for each in (*self.failures, *self._skipped)]
        return "\n".join([table, "", *missing]) if missing else table

    def _write(self, **line: Any) -> None:
        """Appends a line to the one file, and replaces the other."""
        self._lines.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")
        self._lines.flush()
        new = self.file.with_suffix(".new")
        new.write_text(self.markdown() + "\n", encoding="utf-8")
        new.replace(self.file.with_suffix(".md"))

    def _progress(self, what: str) -> None:
        print(f"{self._limit_s - self.left_s:.0f} s, {self._part}: {what}", file=sys.stderr, flush=True)


def longest_kernels(what: str, work: Callable[[], object], device: torch.device, repeats: int) -> Iterator[Row]:
    """The longest kernels of a call of `work`, whose first call is not profiled; on the CPU its operators."""
    on_cuda = device.type == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if on_cuda else torch.profiler.ProfilerActivity.CPU
    work()
    wait(device)
    with torch.profiler.profile(activities=[activity]) as profile:
        start_s = time.perf_counter()
        for _ in range(repeats):
            work()
        wait(device)
        wall_s = time.perf_counter() - start_s
    by_name: dict[str, float] = defaultdict(float)
    for each in profile.key_averages():
        own_us = each.self_device_time_total if on_cuda else each.self_cpu_time_total
        by_name[each.key] += own_us * 1e-6 / repeats
    total_s = sum(by_name.values())
    yield Row(f"{what}: all kernels", "a profiled call", total_s, wall_s / repeats, "s")
    for name, seconds in sorted(by_name.items(), key=lambda item: -item[1])[:LONGEST_KERNELS]:
        if seconds:
            yield Row(f"{what}: `{name.replace('|', '/')[:160]}`", "all kernels", seconds, total_s, "s")
