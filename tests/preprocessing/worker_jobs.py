"""Jobs that tests give to worker processes, and observations of processes and descriptors."""

from __future__ import annotations

import asyncio
import gc
import resource
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from gridsieve.common.sealed_memory import SealedMemory
from gridsieve.services.preprocessing.sources.source import Source, bytes_source
from gridsieve.services.preprocessing.video.resize import UInt8Array
from gridsieve.services.preprocessing.workers.job_queue import JobQueue
from gridsieve.services.preprocessing.workers.jobs import Job, Order
from gridsieve.services.preprocessing.workers.limits import Limits
from gridsieve.services.preprocessing.workers.protocol import Facts

T = TypeVar("T")

SOURCE = bytes_source("video", b"media")
ENTRY = "tests.preprocessing.misbehaving_worker"
MIB = 2**20
LIMITS = Limits(stall_s=20, frame_s=1, memory_bytes=256 * MIB, file_bytes=MIB, frames=1000, length_s=1000)


@dataclass(frozen=True, slots=True)
class Ask:
    """A job of `misbehaving_worker`. Its pieces are (facts, data)."""

    name: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    pieces: int = 1
    piece_bytes: int = MIB
    frames: int = 0
    source: Source = SOURCE

    def order(self, done: int) -> Order:
        return Order(self.name, {**self.facts, "first": done})

    def piece(
        self, number: int, facts: Facts, data: UInt8Array, memory: SealedMemory | None
    ) -> tuple[Facts, UInt8Array]:
        return facts, data


def counting(pieces: int, piece_s: float = 0.0, progress: bool = False, frames: int = 100) -> Ask:
    return Ask("count", {"piece_s": piece_s, "progress": int(progress)}, pieces, frames=frames)


def pieces_made(pieces: list[tuple[Facts, UInt8Array]]) -> list[int]:
    """The numbers of the pieces, whose content must show the same numbers."""
    for facts, data in pieces:
        assert data.size == MIB
        assert (data == facts.values["number"] % 256).all()
    return [facts.values["number"] for facts, _ in pieces]


async def read(queue: JobQueue, job: Job[T]) -> list[T]:
    """All pieces of a job."""
    async with queue.stream(job) as pieces:
        return [each async for each in pieces]


def open_descriptors() -> int:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    """Inside, this process cannot open any descriptor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def open_memories() -> int:
    """Descriptors and mappings of sealed memory that this process has."""
    mapped = Path("/proc/self/maps").read_text().count("memfd:gridsieve")
    return mapped + sum(path.name.startswith("memfd:gridsieve") for path in open_paths())


def open_paths(process: int | str = "self") -> list[Path]:
    """Paths that a process has open, while its threads open and close files."""
    found = []
    for each in Path(f"/proc/{process}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since it was listed
            found.append(each.readlink())
    return found


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)
