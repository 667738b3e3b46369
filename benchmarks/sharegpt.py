"""`make bench-sharegpt`: what pruning saves at one request a second, as the field measures it.

Writes a ShareGPT file of the demo's clips, questions and answers, starts the services, and runs
`gridsieve bench` over it: every rate alone, the same questions at the same times, every clip with other bytes.
Prints the heading and the command's table to stdout.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.report import Beginning
from demo.clips import EVALUATION_SEEDS
from demo.evaluate import encoded, questions_of
from gridsieve.cli.launcher import LocalStack
from gridsieve.common.contract.retention import EVS

RATES = (0.0, 0.1, 0.2, 0.4, 0.75)
NEW_TOKENS = 64
FILE = "sharegpt.json"


def write_sharegpt(folder: Path, clips: int) -> Path:
    """A ShareGPT file with one question about each of the first clips of the evaluation, which lie beside it."""
    seeds = range(EVALUATION_SEEDS, EVALUATION_SEEDS + clips)
    entries: list[dict[str, Any]] = []
    with get_context("spawn").Pool() as pool:
        for seed, clip in zip(seeds, pool.imap(encoded, seeds), strict=True):
            (question,) = questions_of(seed, 1)
            (folder / f"{seed}.mp4").write_bytes(clip)
            turns = [
                {"from": "human", "value": f"<video>\n{question.text}"},
                {"from": "gpt", "value": question.answer},
            ]
            entries.append({"id": str(seed), "conversations": turns, "video": f"{seed}.mp4"})
    path = folder / FILE
    path.write_text(json.dumps(entries, indent=1))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=50, help="clips, and requests at each rate")
    parser.add_argument("--request-rate", type=float, default=1.0, help="requests a second")
    args = parser.parse_args()
    beginning = Beginning.of("sharegpt")
    with tempfile.TemporaryDirectory() as folder:
        path = write_sharegpt(Path(folder), args.requests)
        print(f"wrote {args.requests} clips", file=sys.stderr)
        with LocalStack() as stack:
            command = [sys.executable, "-m", "gridsieve", "bench", "--server", stack.address]
            command += ["--workload", FILE, "--requests", str(args.requests), "--request-rate", str(args.request_rate)]
            command += [word for rate in RATES for word in ("--pruning-rate", f"{rate:g}")]
            command += ["--pruning-method", EVS, "--max-new-tokens", str(NEW_TOKENS), "--ignore-eos"]
            print(beginning, flush=True)
            subprocess.run(command, cwd=path.parent, check=True)


if __name__ == "__main__":
    main()
