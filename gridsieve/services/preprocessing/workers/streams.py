"""Decodes streams of encoded video as they come: each in a worker process of its own, for as long as it lasts.

    worker    READ        READ        PIECE       READ …       it says one thing at a time, and waits for the answer
    service        DATA        DATA         NEXT

So a worker waits for bytes or for the reader of its frames, or it works, which takes at most so long for each answer. A
stream that crashes or hangs its decoder costs nobody else anything.

    worker    PROGRESS    PIECE       PROGRESS …               of a camera, whose bytes it gets by a socket
    service                     NEXT

The worker of a camera says PROGRESS while it waits for the camera or takes what it sends.
"""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import structlog

from gridsieve.common.contract.errors import MediaDamaged, Overloaded, PeerContract
from gridsieve.common.contract.limits import MAX_RAW_PIXELS
from gridsieve.common.sealed_memory import SealedMemory, sealed
from gridsieve.services.preprocessing.fetch.camera import Camera
from gridsieve.services.preprocessing.sources.source import resource_errors_as_overloaded
from gridsieve.services.preprocessing.video.stream import StreamFrame
from gridsieve.services.preprocessing.workers.job_queue import failure_of
from gridsieve.services.preprocessing.workers.limits import Limits
from gridsieve.services.preprocessing.workers.process import Fault, WorkerFault, WorkerProcess
from gridsieve.services.preprocessing.workers.protocol import MAX_INT, PROGRESS_S, Facts, Kind, Message
from gridsieve.services.preprocessing.workers.stream_room import CoresUsed, StreamRoom

_WORKER = "gridsieve.services.preprocessing.workers.worker"
_CAMERA_WORKER = "gridsieve.services.preprocessing.workers.camera_worker"
# The longest work between two things that a worker says, where --decode-timeout-s is not shorter.
_STALL_S = 30.0
_PIECES = 2**31 - 1  # a stream has no end that is known
# FFmpeg asks some times more once a stream has ended.
_READS_AFTER_END = 100
_LEAVE_S = 1.0
# A camera's clock that differs by more from this host's is not believed.
_MOST_WRONG_S = 24 * 3600

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Read:
    """A worker has read all bytes so far, and asks for more. size_bytes: how many those were."""

    size_bytes: int


class StreamWorkers:
    """The streams that are watched, as many as there is room for."""

    def __init__(self, room: StreamRoom, limits: Limits, on_fault: Callable[[Fault], None]) -> None:
        """on_fault: called when a stream ends with a fault of its worker."""
        self._room, self._limits, self._on_fault = room, limits, on_fault
        self._running = self._running_cameras = 0
        self._cameras: dict[WorkerProcess, CoresUsed] = {}

    @contextmanager
    def place(self, name: str, *, camera: bool) -> Iterator[None]:
        """Holds the place of a stream, for its `events`. Raises Overloaded where there is no room for one more.

        camera: whether it does not wait where cores lack, as what a client sends does.
        """
        measured = [cores for each in self._cameras.values() if (cores := each.now()) is not None]
        if refusal := self._room.refusal(self._running, self._running_cameras, measured):
            raise Overloaded(refusal, field=name)
        self._running += 1
        self._running_cameras += camera
        try:
            yield
        finally:
            self._running -= 1
            self._running_cameras -= camera

    async def events(
        self,
        name: str,
        fps: float,
        source: Camera | Callable[[], Awaitable[bytes]],
        *,
        live: bool = False,
        jpegs: bool = False,
    ) -> AsyncGenerator[StreamFrame | Read]:
        """What the worker of a stream does, until the stream ends. Closing the generator ends the worker.

        name: of the stream, for error texts. source: a camera, or a function that waits for the next bytes; they are
        empty once the stream has ended. live, jpegs: of such bytes, as in `stream_frames`.
        Raises MediaRejected for bytes that are no video, MediaDamaged where the worker fails, Overloaded where the
        machine is out of resources, and whatever `source` raises.
        """
        worker: WorkerProcess | None = None
        try:
            with resource_errors_as_overloaded(name):
                worker = WorkerProcess.start(_CAMERA_WORKER if isinstance(source, Camera) else _WORKER, self._limits)
                facts = {"media": name, "pieces": _PIECES, "fps": float(fps), "live": live, "jpegs": jpegs}
                try:
                    await worker.ready()
                    used = CoresUsed(worker.processor_s, time.monotonic)  # to start takes a second, which is left out
                    if live or isinstance(source, Camera):
                        self._cameras[worker] = used
                    async with aclosing(self._talk(worker, facts, source)) as events:
                        async for event in events:
                            used.now()  # so that it is of the last seconds when the next stream comes
                            yield event
                finally:
                    self._cameras.pop(worker, None)
                    if isinstance(source, Camera):
                        await _leave(worker)
        except WorkerFault as error:
            self._on_fault(error.fault)
            log.warning("a stream's worker failed", fault=error.fault, error=str(error))
            raise MediaDamaged(f"cannot be decoded: {error}", field=name) from error
        except PeerContract as error:
            self._on_fault(Fault.CONTRACT)
            log.error("a stream's worker failed", fault=Fault.CONTRACT, error=str(error))
            raise MediaDamaged("cannot be decoded: its decoder failed", field=name) from error
        finally:
            if worker:
                await worker.end()

    async def _talk(
        self, worker: WorkerProcess, facts: dict[str, Any], source: Camera | Callable[[], Awaitable[bytes]]
    ) -> AsyncGenerator[StreamFrame | Read]:
        clock = asyncio.get_running_loop().time
        began_s, told = clock(), 0
        _begin(worker, facts, source)
        worker.send(Kind.NEXT)
        given_bytes, empty = 0, 0
        while True:
            message = await self._receive(worker)
            if message.truncated:  # this process had no free descriptor for the array
                message.close()
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            match message.kind, len(message.descriptors):
                case Kind.PROGRESS, 0 if isinstance(source, Camera):
                    told += 1
                    if told > (clock() - began_s) / PROGRESS_S + 1:  # a worker may not keep the event loop busy
                        raise PeerContract("a worker reports progress too often")
                    await asyncio.sleep(0)  # nor may those that wait already
                case Kind.READ, 0 if not isinstance(source, Camera):
                    if given_bytes:
                        yield Read(given_bytes)
                    data = await source()
                    given_bytes += len(data)
                    empty += not data
                    if empty > _READS_AFTER_END:
                        raise PeerContract("a worker does not notice the end of a stream")
                    _give(worker, data)
                case Kind.PIECE, 1:
                    yield _frame(message)
                    worker.send(Kind.NEXT)
                case Kind.DONE, 0:
                    return
                case Kind.FAILED, 0:
                    raise failure_of(message.facts, self._limits)
                case kind, _:
                    message.close()
                    raise PeerContract(f"a worker sent {kind} of a stream, or the wrong number of arrays")

    async def _receive(self, worker: WorkerProcess) -> Message:
        stall_s = min(_STALL_S, self._limits.stall_s)
        with suppress(TimeoutError):
            async with asyncio.timeout(stall_s):
                return await worker.receive()
        raise WorkerFault(Fault.SLOW, f"it made no progress for {stall_s:g} s")


async def _leave(worker: WorkerProcess) -> None:
    """Lets a worker tell its camera that it leaves (TEARDOWN), which it does after its next frame."""
    with suppress(WorkerFault, PeerContract, TimeoutError):
        async with asyncio.timeout(_LEAVE_S):
            if worker.working:
                worker.send(Kind.STOP)
            while worker.working:
                (await worker.receive()).close()
                await asyncio.sleep(0)  # a worker that says much without end must not keep the event loop


def _begin(worker: WorkerProcess, facts: dict[str, Any], source: Camera | Callable[[], Awaitable[bytes]]) -> None:
    """Sends the job, whose file and numbers are empty."""
    nothing = sealed(memoryview(b""))
    try:
        if not isinstance(source, Camera):
            worker.send(Kind.JOB, Facts(facts | {"job": "watched_frames"}), (nothing, nothing))
            return
        facts |= {"job": "camera_frames", "target": source.target, "login": source.login, "silent_s": source.silent_s}
        with source.connection as connection:
            worker.send(Kind.JOB, Facts(facts), (nothing, nothing, connection.fileno()))
    finally:
        os.close(nothing)


def _give(worker: WorkerProcess, data: bytes) -> None:
    if not data:
        worker.send(Kind.DATA)
        return
    memory = sealed(memoryview(data))
    try:
        worker.send(Kind.DATA, None, (memory,))
    finally:
        os.close(memory)


def _frame(message: Message) -> StreamFrame:
    with SealedMemory(message.descriptors[0]) as memory:
        facts = message.facts
        height, width = (facts.integer(each, 1, MAX_RAW_PIXELS) for each in ("height_px", "width_px"))
        if height * width > MAX_RAW_PIXELS:
            raise PeerContract(f"a worker's frame has {width}×{height} pixels")
        size_bytes = 3 * height * width
        pixels = memory.mapped(size_bytes, size_bytes).reshape(height, width, 3)
        filmed_us = facts.integer("filmed_us", -MAX_INT, MAX_INT) if "filmed_us" in facts.values else None
        if filmed_us is not None and abs(filmed_us / 10**6 - time.time()) > _MOST_WRONG_S:
            filmed_us = None
        return StreamFrame(pixels, facts.integer("time_us", -MAX_INT, MAX_INT), filmed_us)
