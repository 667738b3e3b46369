"""`make bench-gpu`: a CUDA device, in calls of a few minutes, each of which needs no other.

    engine    decode, prefill and kernels with random weights, against the roofline and `generate`
    tower     forwards and graphs of the vision tower, and pruning
    stack     the three services, from a video's bytes to the tokens; needs PyAV and room for a checkpoint

Without a CALL the first two, one after the other, each in a process of its own. Rows are written as they are measured,
to gpu-CALL-CARD.jsonl and gpu-CALL-CARD.md: a call that is killed leaves what it measured. What does not fit into the
time is skipped, and named there. A call that hangs is ended at its limit, with the threads' tracebacks. Exit status 1:
a part failed.

    python -m benchmarks.gpu engine --target qwen3-vl-8b --minutes 8 --out results
    python -m benchmarks.gpu engine --target tiny --device cpu          tries the benchmark itself, on any machine
"""

from __future__ import annotations

import argparse
import faulthandler
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from importlib import import_module
from pathlib import Path

import torch

from benchmarks.gpu.call import Call, Part
from benchmarks.gpu.targets import PUBLISHED, TARGETS
from gridsieve.common.telemetry.logs import configure_logging

DEFAULT_CALLS = ("engine", "tower")
CALLS = (*DEFAULT_CALLS, "stack")
MINUTES = 8.0
STDERR = 2


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("call", choices=CALLS, nargs="?", help=f"default {', '.join(DEFAULT_CALLS)}")
    parser.add_argument("--only", action="append", metavar="PART", help="measure this part; may be repeated")
    parser.add_argument("--target", choices=list(TARGETS), default=PUBLISHED[0], help="sizes; default %(default)s")
    parser.add_argument("--device", default="cuda", help="default %(default)s")
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, help="when it ends, after its imports; default %(default)g"
    )
    parser.add_argument(
        "--out", type=Path, help="folder of the files; default on CUDA benchmarks/, else the current one"
    )
    args = parser.parse_args()
    if args.call is None and args.only:
        parser.error("--only needs a CALL, whose parts it names")
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("torch finds no CUDA device on this machine; --target tiny --device cpu tries the benchmark itself")
    device = torch.zeros(1, device=device).device  # `cuda` has no index, and would not equal its tensors' device
    if args.call is None:
        command = [sys.executable, "-m", "benchmarks.gpu"]
        ended = [subprocess.call([*command, each, *sys.argv[1:]]) for each in DEFAULT_CALLS]
        return int(any(ended))
    folder = args.out or (Path(__file__).parents[1] if device.type == "cuda" else Path())
    faulthandler.dump_traceback_later(60 * args.minutes, exit=True, file=STDERR)
    try:
        configure_logging("benchmarks", "auto", "warning")  # to stderr
        # Each call imports what it needs alone: the stack needs PyAV.
        parts_of: Callable[[Call], Mapping[str, Part]] = import_module(f"benchmarks.gpu.{args.call}").parts
        name = "-".join([args.call, *(args.only or ())])
        with closing(Call(name, TARGETS[args.target], args.target, device, 60 * args.minutes, folder)) as call:
            parts = parts_of(call)
            if unknown := set(args.only or ()) - parts.keys():
                parser.error(f"--only {unknown.pop()}: {args.call} has the parts {', '.join(parts)}")
            for name in args.only or parts:
                call.run(name, parts[name])
            print(call.markdown())
            return int(bool(call.failures))
    finally:
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    sys.exit(main())
