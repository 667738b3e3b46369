"""Time to first token of a large clip that is sent with the question, against the same clip named by its path.

Two clips: H.264 in 1080p, which takes longer to decode than to send, and MJPEG of which eight frames are used, which
takes longer to send than to decode.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from benchmarks.ask import ask
from benchmarks.clips import RATE, another_file, clip
from benchmarks.processes import peak_bytes
from benchmarks.table import Row, Timings
from gridsieve.cli.launcher import LocalStack
from gridsieve.client.client import GridsieveClient
from gridsieve.client.prompt import Video

QUESTION, PRUNING_RATE = "What moves?", 0.75
AT_MOST = 1.2


def inline(rounds: int) -> list[Row]:
    clips = {
        "H.264, 1080p": (clip(24 * RATE, 1080, 1920, keyframe_every=60), None),
        "MJPEG, 8 frames used": (clip(77, 1080, 1920, codec="mjpeg"), 8),
    }
    return [asyncio.run(_row(name, data, max_frames, rounds)) for name, (data, max_frames) in clips.items()]


async def _row(name: str, data: bytes, max_frames: int | None, rounds: int) -> Row:
    taken = Timings()
    with tempfile.TemporaryDirectory() as folder:
        async with LocalStack(media_root=Path(folder)) as stack, GridsieveClient(stack.address) as client:
            before = {service: peak_bytes(process.pid) for service, process in stack.processes.items()}
            for number in range(rounds + 1):
                Path(folder, f"{number}").write_bytes(another_file(data))
                ways = {
                    "path": Video(server_path=f"{number}", max_frames=max_frames),
                    "inline": Video(data=another_file(data), max_frames=max_frames),
                }
                for way, video in ways.items():
                    asked, _ = await ask(client, video, QUESTION, pruning_rate=PRUNING_RATE, max_new_tokens=2)
                    if number:  # the first is a warm-up
                        taken.add(way, asked.first_token_s)
            grown = {service: peak_bytes(process.pid) - before[service] for service, process in stack.processes.items()}
    note = "peak memory grew by " + ", ".join(f"{size >> 20} MiB in {service}" for service, size in grown.items())
    what = f"{len(data) / 2**20:.0f} MiB of {name}, sent with the question, first token"
    return Row(
        what, "by path", taken.median("inline"), taken.median("path"), "s", at_most=AT_MOST, note=f"{note}, both ways"
    )
