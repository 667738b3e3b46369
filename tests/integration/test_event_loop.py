"""No service hashes, copies or writes large media on its event loop, where every other request would wait for it.

Processor time is measured, not wall time as by asyncio's debug mode, which on a busy machine counts other processes.
What is slow once only (a first import, a measurement that the machine disturbed) is no fault: a fault is slow in every
round.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from framesieve.client.client import FramesieveClient
from framesieve.client.prompt import Video
from tests import media
from tests.integration.fleet import Service
from tests.preprocessing.media_server import ok, serving

# A quiet machine needs at most 3 for a callback, and 30 to hash the file.
MAX_MS = 10.0
ROUNDS = 3
FILE_BYTES = 48 * 2**20

PROGRAM = f"""
import asyncio.events, re, runpy, time

run = asyncio.events.Handle._run

def timed(handle):
    began = time.thread_time()
    run(handle)
    spent_ms = (time.thread_time() - began) * 1e3
    if spent_ms > {MAX_MS}:
        task = getattr(handle._callback, "__self__", None)
        work = task.get_coro() if isinstance(task, asyncio.Task) else handle._callback
        print("SLOW", getattr(work, "__qualname__", re.sub(" at 0x\\\\w+", "", repr(work))), flush=True)

asyncio.events.Handle._run = timed
runpy.run_module("framesieve.services.{{name}}", run_name="__main__", alter_sys=True)
"""


@pytest.fixture
def services(tiny_checkpoint: Path, tmp_path: Path, fetch_port: int) -> Iterator[tuple[Service, ...]]:
    """Preprocessing, encoder and generation, which print the name of each slow callback."""

    def service(name: str, *flags: str) -> Service:
        return Service(name, tiny_checkpoint, tmp_path, flags, program=PROGRAM.format(name=name))

    fetching = ("--fetch-ports", str(fetch_port), "--allow-media-domain", "localhost=127.0.0.0/8,localhost=::1")
    preprocessing = service("preprocessing", "--media-root", str(tmp_path), *fetching)
    encoder = service("encoder", "--preprocessing", preprocessing.address)
    generation = service("generation", "--preprocessing", preprocessing.address, "--encoder", encoder.address)
    started = (preprocessing, encoder, generation)
    try:
        for each in started:
            each.start()
        for each in started:
            each.ready()
        yield started
    finally:
        for each in started:
            each.close()


async def test_large_media_do_not_hold_up_the_event_loops(
    services: tuple[Service, ...], tmp_path: Path, fetch_port: int
) -> None:
    slow: list[set[str]] = []
    async with FramesieveClient(services[-1].address) as client:
        for number in range(ROUNDS):
            before = [len(each.log()) for each in services]
            # A box that readers skip makes the clip large.
            clip = media.clip(seed=number) + FILE_BYTES.to_bytes(4, "big") + b"free" + bytes(FILE_BYTES - 8)
            (tmp_path / "clip.mp4").write_bytes(clip)
            async with serving(ok(clip), port=fetch_port):
                for video in (Video(url=f"http://localhost:{fetch_port}/{number}"), Video(server_path="clip.mp4")):
                    await client.ask(video, "What moves?", max_new_tokens=8, timeout_s=60)
            await client.ask(Video(data=media.clip(fps=8, seed=number)), "What moves?", max_new_tokens=8, timeout_s=60)
            printed = {
                f"{each.name}: {name}"
                for each, length in zip(services, before, strict=True)
                for name in re.findall(r"^SLOW (.*)", each.log()[length:], re.MULTILINE)
            }
            slow.append(printed)
    assert not set.intersection(*slow), slow
