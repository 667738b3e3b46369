"""`make bench-gpu`: tower, pruning, engine and the whole stack on a CUDA device, against transformers and its limits.

The checkpoints have the published layouts of Qwen2.5-VL-7B and Qwen3-VL-8B, with random weights drawn on the device.
The limits are the roofline: the peak rates of arithmetic and memory are measured in the same run, and a share of the
roofline is the time that these allow at least, divided by the measured one. Tower, engine and `generate` run in this
process one after another; the three services are started for the last measurement. Medians over rounds.

    python -m benchmarks.gpu --target qwen3-vl-8b --only decode --only stack

Prints Markdown or JSON to stdout and progress to stderr. On CUDA the Markdown is also written to a file, again after
each measurement, so that an interrupted run leaves what it measured. A target takes about 10 minutes.
`--target tiny --device cpu` tries the benchmark itself on any machine.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks import gpu_device
from benchmarks.gpu_device import Peaks
from benchmarks.gpu_encoder import graphs, pruning, tower
from benchmarks.gpu_engine import decode, prefill
from benchmarks.gpu_models import PUBLISHED, TARGETS, written
from benchmarks.gpu_run import Run
from benchmarks.gpu_services import stack
from benchmarks.report import Beginning, markdown, options, report
from benchmarks.table import Row
from common.telemetry.logs import configure_logging

MEASUREMENTS: Mapping[str, Callable[[Run], list[Row]]] = {
    "tower": tower,
    "graphs": graphs,
    "pruning": pruning,
    "prefill": prefill,
    "decode": decode,
    "stack": stack,
}


def main() -> None:
    parser = options(__doc__, MEASUREMENTS, rounds=3, least_rounds=1)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--target",
        choices=list(TARGETS),
        action="append",
        help=f"checkpoint and sizes; may be repeated; default {', '.join(PUBLISHED)}",
    )
    parser.add_argument("--device", default="cuda", help="where; default %(default)s")
    parser.add_argument("--write", type=Path, help="the Markdown file; default on CUDA benchmarks/gpu-CARD.md")
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("torch finds no CUDA device on this machine; --target tiny --device cpu tries the benchmark itself")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    configure_logging("benchmarks", "auto", "warning")  # to stderr
    beginning, began_s, rows = Beginning.of("gpu"), time.monotonic(), list[Row]()
    file = args.write or (gpu_device.results_file(device) if device.type == "cuda" else None)
    about = {"device": gpu_device.about(device), "dtype": str(dtype).removeprefix("torch.")}
    for name in args.target or PUBLISHED:
        target = TARGETS[name]
        peaks = Peaks.measured(device, dtype, target.side, target.copied_bytes)
        _progress(began_s, f"{name}: writing the checkpoint")
        about[name] = f"{name}: {peaks}"
        with written(target, device, dtype) as folder:
            run = Run(target, folder, device, dtype, args.rounds, peaks)
            for measurement in args.only or MEASUREMENTS:
                _progress(began_s, f"{name}: {measurement}")
                gpu_device.give_back(device)
                rows += [replace(row, what=f"{name}: {row.what}") for row in MEASUREMENTS[measurement](run)]
                if file:
                    file.write_text(markdown(beginning, rows, **about) + "\n")
    report(beginning, rows, args.json, **about)


def _progress(since_s: float, what: str) -> None:
    print(f"{time.monotonic() - since_s:.0f} s, {what}", file=sys.stderr)


if __name__ == "__main__":
    main()
