"""`make fuzz`: indexes and decodes mutated media in child processes, which must neither crash nor hang.

Each process takes a batch of files and saves the current one, so that the file at fault is kept. A file passes if it is
decoded, or refused as bad media.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from gridsieve.common.contract.errors import MediaDamaged, MediaRejected
from gridsieve.services.preprocessing.sources.source import Source, bytes_source
from gridsieve.services.preprocessing.video.decode import decode_frames
from gridsieve.services.preprocessing.video.packets import read_packets
from gridsieve.services.preprocessing.video.pictures import decode_picture, read_picture
from tests.fuzz.mutations import mutations

BATCH = 200
FILE_LIMIT_S = 20


def decode(source: Source) -> None:
    """Indexes and decodes like a request, with frames from the whole file. Raises MediaRejected and MediaDamaged."""
    if source.name.startswith("picture"):
        decode_picture(source, read_picture(source))
        return
    index = read_packets(source)
    frames = len(index.times.ticks)
    places = sorted({place * (frames - 1) // 7 for place in range(8)})
    for _ in decode_frames(source, index, places):
        pass


def decode_all(seed: int, count: int, progress: Path) -> Counter[str]:
    """Counts the outcomes of the files. `progress`: a file that always holds the current one under its name."""
    ends: Counter[str] = Counter()
    for name, data in mutations(seed, count):
        progress.write_bytes(name.encode() + b"\n" + data)
        start = time.monotonic()
        try:
            decode(bytes_source(name, data or b"\0"))
            ends["decoded"] += 1
        except (MediaRejected, MediaDamaged) as error:
            ends[type(error).__name__] += 1
        if time.monotonic() - start > FILE_LIMIT_S:
            raise TimeoutError(f"{name} took more than {FILE_LIMIT_S} s")
    return ends


def run_batch(seed: int, count: int, progress: Path) -> str | None:
    """Runs a batch in a child process. Returns the failure, or None."""
    command = [sys.executable, "-m", "tests.fuzz.run", "--child", str(progress), "--seed", str(seed)]
    try:
        done = subprocess.run(
            [*command, "--mutations", str(count)], capture_output=True, text=True, timeout=FILE_LIMIT_S * count / 10
        )
    except subprocess.TimeoutExpired:
        return "hung"
    if done.returncode == 0:
        return None
    return f"ended with {done.returncode}: {done.stderr[-2000:]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutations", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(dict(decode_all(args.seed, args.mutations, args.child)))
        return
    faults = 0
    for number in range(0, args.mutations, BATCH):
        progress = Path(tempfile.gettempdir()) / f"fuzz-{args.seed + number}"
        fault = run_batch(args.seed + number, min(BATCH, args.mutations - number), progress)
        print(f"{number + BATCH} of {args.mutations}: {fault or 'fine'}", flush=True)
        if fault:
            faults += 1
            print(f"the file at fault is in {progress}, after a line with its name")
        else:
            progress.unlink()
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
