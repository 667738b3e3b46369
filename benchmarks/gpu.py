"""`make bench-gpu`: the tower, pruning and the engine on a CUDA device, against the device's peak rates.

The checkpoint has the shape of Qwen2.5-VL-7B and random weights drawn on the device. All measurements run in this
process except the last, which starts the three services. Medians over rounds; ratios within one run. Prints Markdown or
JSON to stdout and progress to stderr. `--target tiny --device cpu` tries the benchmark itself on any machine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

import torch

from benchmarks import gpu_device
from benchmarks.gpu_encoder import graphs, pruning, tower
from benchmarks.gpu_engine import decode, prefill, throughput
from benchmarks.gpu_models import TARGETS, written
from benchmarks.gpu_run import Run
from benchmarks.gpu_services import first_token
from benchmarks.report import Beginning, options, report
from benchmarks.table import Row
from common.telemetry.logs import configure_logging

MEASUREMENTS: Mapping[str, Callable[[Run], list[Row]]] = {
    "graphs": graphs,
    "pruning": pruning,
    "tower": tower,
    "prefill": prefill,
    "decode": decode,
    "throughput": throughput,
    "first-token": first_token,
}


def main() -> None:
    parser = options(__doc__, MEASUREMENTS, rounds=5, least_rounds=1)
    parser.add_argument("--target", choices=list(TARGETS), default="7b", help="sizes of checkpoint and videos")
    parser.add_argument("--device", default="cuda", help="where; default %(default)s")
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("torch finds no CUDA device on this machine; --target tiny --device cpu tries the benchmark itself")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    configure_logging("benchmarks", "auto", "warning")  # to stderr
    beginning = Beginning.of("gpu")
    target, rows = TARGETS[args.target], []
    with written(target, device, dtype) as folder:
        run = Run(target, folder, device, dtype, args.rounds)
        for name in args.only or MEASUREMENTS:
            rows += MEASUREMENTS[name](run)
            gpu_device.give_back(device)
    about = (
        f"{args.target} in {str(dtype).removeprefix('torch.')} on {gpu_device.name(device)}, torch {torch.__version__}"
    )
    report(beginning, rows, args.json, models=about)


if __name__ == "__main__":
    main()
