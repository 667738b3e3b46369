"""`make soak-live`: an hour of a live session in minutes, an hour of 30 cameras, then a thousand sessions.

    hour        a clip over and over, two frames a second by their times, sent as fast as they are taken; a question
                each minute, of which every second one stays. Memory in the last minute against that in the fifth
    cameras     streams by RTSP in real time, see `cameras.py`: each frame is shown or counted as dropped
    thousand    sessions that are closed, cancelled, or whose process is killed, half of them within an answer;
                afterwards no service has more descriptors, blocks or upstream calls than before, at most six more
                threads, and at most 32 MiB more memory

Prints a report as JSON and exits with status 1 if memory grew, a pushed frame was dropped, a frame of a camera was not
counted, a service logged a warning while it watched cameras, or anything was not given back.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import grpc

from benchmarks.live.session import Session
from benchmarks.processes import resident_bytes, tree
from demo.example import CLIP
from gridsieve.cli import footage
from gridsieve.cli.signals import unwind_on_signals
from gridsieve.common.channels import open_channel
from gridsieve.common.checkpoint import DEMO_MODEL
from gridsieve.common.security.credentials import NO_CREDENTIALS
from gridsieve.v1.generation_pb2 import LiveClose
from tests.integration.fleet import Service, Stack, at_rest, running
from tests.soak import cameras

FPS = 2
MINUTE_S = 60
EARLY_MINUTE = 5
AT_MOST = 1.05
SAMPLED_EVERY = 5  # slices
ANSWER_TOKENS = 128
OPENED = {"fps": FPS, "window_tokens": 1024, "answer_tokens": ANSWER_TOKENS}
AT_ONCE = 10
KILLED_AT_ONCE = 50
WARM_UP = 100
SETTLE_S = 10.0
# Pools start a thread when all of theirs are busy, up to a bound; a leak is one for each session, or for some.
LAZY_THREADS = 6
# The allocator keeps some freed memory. A leak of 33 KiB a session exceeds this in a thousand.
GROWTH_BYTES = 32 * 2**20
# Small, so that caches are full before memory is measured.
FLAGS: dict[str, tuple[str, ...]] = {
    "preprocessing": ("--inflight-bytes", str(8 * 2**20)),
    "encoder": ("--cache-bytes", str(2 * 2**20)),
    "generation": ("--kv-cache-tokens", "65536", "--live-tokens", "61440"),
}


@dataclass(frozen=True, slots=True)
class Report:
    """early_bytes, late_bytes: median memory by service in the fifth and in the last minute of the session.

    before, after: the thousand sessions, by service: threads, descriptors, resident bytes. faults: all that went wrong.
    """

    minutes: int
    took_s: float
    dropped: int
    early_bytes: dict[str, float]
    late_bytes: dict[str, float]
    cameras: cameras.Report | None
    sessions: int
    sessions_took_s: float
    before: dict[str, dict[str, int]]
    after: dict[str, dict[str, int]]
    faults: list[str]


async def hour(stack: Stack, pictures: Sequence[bytes], minutes: int) -> tuple[dict[int, dict[str, list[int]]], int]:
    """Samples of memory by minute and service, and how many frames were dropped."""
    memory: dict[int, dict[str, list[int]]] = {}
    async with open_channel(stack.address, NO_CREDENTIALS) as channel, Session.opened(channel, **OPENED) as session:
        for number in range(minutes * MINUTE_S * FPS // 2):
            await session.watch(*slice_of(pictures, number))
            minute, within = divmod(number, MINUTE_S * FPS // 2)
            if not within:
                await session.ask(16, transient=minute % 2 == 0)
                await session.until("finished")
            if not number % SAMPLED_EVERY:
                samples = memory.setdefault(minute + 1, {name: [] for name in stack.services})
                for name, service in stack.services.items():
                    samples[name].append(resident_bytes(service.pid))
        await session.send(close=LiveClose())
        await session.ended()
        return memory, session.dropped


def slice_of(pictures: Sequence[bytes], number: int) -> tuple[list[bytes], list[float]]:
    """The frames of a slice of the clip over and over, and their times."""
    both = (2 * number, 2 * number + 1)
    return [pictures[frame % len(pictures)] for frame in both], [frame / FPS for frame in both]


async def sessions(stack: Stack, pictures: Sequence[bytes], count: int) -> None:
    """Opens and ends so many sessions: a quarter are closed, half cancelled, and a quarter end with their process."""
    waiting = iter(range(count * 3 // 4))

    async def some() -> None:
        async with open_channel(stack.address, NO_CREDENTIALS) as channel:
            for number in waiting:
                await _session(channel, pictures, number)

    await asyncio.gather(*(some() for _ in range(AT_ONCE)))
    for first in range(count * 3 // 4, count, KILLED_AT_ONCE):
        await asyncio.to_thread(_killed, stack.address, pictures, min(KILLED_AT_ONCE, count - first))


async def _session(channel: grpc.aio.Channel, pictures: Sequence[bytes], number: int) -> None:
    async with Session.opened(channel, **OPENED) as session:
        await session.watch(*slice_of(pictures, 0))
        if number % 2:
            await session.ask(ANSWER_TOKENS // 2, transient=False)
            await session.until("delta")
        if number % 3 == 0:
            await session.send(close=LiveClose())
            await session.ended()


def _killed(address: str, pictures: Sequence[bytes], count: int) -> None:
    """So many sessions of a process that is killed while they are open."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_stay_open, args=(there, address, tuple(pictures[:2]), count))
    process.start()
    try:
        if not here.poll(60):
            raise AssertionError("sessions of another process were not opened")
    finally:
        process.kill()
        process.join()
        here.close()
        there.close()


def _stay_open(opened: Connection, address: str, pictures: Sequence[bytes], count: int) -> None:
    async def stay() -> None:
        async with open_channel(address, NO_CREDENTIALS) as channel:

            async def one(number: int) -> None:
                async with Session.opened(channel, **OPENED) as session:
                    await session.watch(*slice_of(pictures, 0))
                    if number % 2:
                        await session.ask(ANSWER_TOKENS // 2, transient=False)
                        await session.until("delta")
                    ready.release()
                    await asyncio.Event().wait()

            ready = asyncio.Semaphore(0)
            staying = [asyncio.create_task(one(number)) for number in range(count)]
            for _ in staying:
                await ready.acquire()
            opened.send(True)
            await asyncio.gather(*staying)

    asyncio.run(stay())


def held(services: Sequence[Service]) -> dict[str, dict[str, int]]:
    """What each service and its workers hold."""
    return {
        service.name: {
            "threads": sum(len(list(Path(f"/proc/{each}/task").iterdir())) for each in tree(service.pid)),
            "descriptors": sum(len(list(Path(f"/proc/{each}/fd").iterdir())) for each in tree(service.pid)),
            "bytes": resident_bytes(service.pid),
        }
        for service in services
    }


async def settled(services: Sequence[Service], most: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    """What the services hold once that is no more than `most`, or after SETTLE_S."""
    end_s = time.monotonic() + SETTLE_S
    while True:
        found = held(services)
        if time.monotonic() > end_s or not list(more(found, most)):
            return found
        await asyncio.sleep(0.1)


def more(found: dict[str, dict[str, int]], most: dict[str, dict[str, int]]) -> list[str]:
    """What is held beyond `most`, but for some threads of pools and some memory."""
    return [
        f"{name} has {found[name][kind]} {kind}, and had {most[name][kind]}"
        for name in found
        for kind, room in (("threads", LAZY_THREADS), ("descriptors", 0), ("bytes", GROWTH_BYTES))
        if found[name][kind] > most[name][kind] + room
    ]


async def soak(minutes: int, count: int, camera_count: int) -> Report:
    pictures = [picture for _, picture in footage.pictures(str(CLIP), FPS)]
    async with cameras.filming(camera_count, minutes) as filmed:
        flags = {**FLAGS, "preprocessing": (*FLAGS["preprocessing"], *filmed.flags, "--max-streams", str(camera_count))}
        with running(DEMO_MODEL, flags=flags, alone=True) as stack:
            services = list(stack.services.values())
            began_s = time.monotonic()
            memory, dropped = await hour(stack, pictures, minutes)
            took_s = time.monotonic() - began_s
            early, late = (
                {name: statistics.median(samples) for name, samples in memory[minute].items()}
                for minute in (min(EARLY_MINUTE, minutes), minutes)
            )
            faults = [f"{dropped} frames were dropped"] * bool(dropped)
            faults += [
                f"{name} grew {late[name] / before:.3f} times"
                for name, before in early.items()
                if late[name] > AT_MOST * before
            ]
            watched = await cameras.watch(stack, filmed, camera_count, minutes) if camera_count else None
            faults += watched.faults if watched else []
            await sessions(stack, pictures, min(WARM_UP, count))
            await at_rest(services, SETTLE_S)
            before, began_s = held(services), time.monotonic()
            await sessions(stack, pictures, count)
            sessions_took_s = time.monotonic() - began_s
            try:
                await at_rest(services, SETTLE_S)
            except AssertionError as still:
                faults.append(f"still held without sessions: {still}")
            after = await settled(services, before)
            faults += more(after, before)
    return Report(*(minutes, took_s, dropped, early, late, watched), *(count, sessions_took_s, before, after, faults))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--minutes", type=int, default=60, help="of the long session, by the times of its frames, and of the cameras"
    )
    parser.add_argument("--cameras", type=int, default=30)
    parser.add_argument("--sessions", type=int, default=1000)
    args = parser.parse_args()
    unwind_on_signals()
    report = asyncio.run(soak(args.minutes, args.sessions, args.cameras))
    print(json.dumps(asdict(report), indent=2))
    sys.exit(1 if report.faults else 0)


if __name__ == "__main__":
    main()
