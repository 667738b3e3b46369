"""A process that reads, indexes and decodes strangers' media, one job at a time, until its service is gone.

It owns nothing but its connection: media come as open files, arrays leave in sealed memory, what it may do stands in a
table. `pool` starts it afresh, without the service's memory, environment and descriptors.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from common.contract.errors import FramesieveError, MediaRejected
from common.process import give_back_freed_memory
from services.preprocessing.sources.memory import sealed
from services.preprocessing.sources.source import Source, check_file_size
from services.preprocessing.video.decode import Rest
from services.preprocessing.video.packets import read_packets
from services.preprocessing.video.pictures import Picture, read_picture
from services.preprocessing.video.slices import PlannedPicture, PlannedVideo, Slice
from services.preprocessing.workers.jobs import index_facts, index_of
from services.preprocessing.workers.limits import Limits, confine
from services.preprocessing.workers.protocol import MAX_TEXT_CHARACTERS, Facts, Kind, Message, receive, send

_MAX_SIDE_PX = 2**16
_RETRY_S = 0.01


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """A job as it arrived: the media, what is said about them, and many numbers, int64 [N]."""

    source: Source
    limits: Limits
    facts: Facts
    numbers: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """A piece of a job's result: facts, and any array."""

    facts: Mapping[str, Any]
    data: NDArray[Any] = field(default_factory=lambda: np.empty(0, np.uint8))


Jobs: TypeAlias = Mapping[str, Callable[[Task], Generator[Answer, None, None]]]


def index_video(task: Task) -> Generator[Answer, None, None]:
    index = read_packets(task.source)
    frames, length_s = len(index.times.ticks), index.times.length_s
    if frames > task.limits.frames:
        raise MediaRejected(f"{task.source.name} has {frames} frames, at most {task.limits.frames} are allowed")
    if length_s > task.limits.length_s:
        raise MediaRejected(
            f"{task.source.name} lasts {float(length_s):.0f} s, at most {task.limits.length_s} are allowed"
        )
    yield Answer(*index_facts(index))


def index_picture(task: Task) -> Generator[Answer, None, None]:
    found = read_picture(task.source)
    orientation = found.orientation if 1 <= found.orientation <= 8 else 1
    yield Answer({"height_px": found.height_px, "width_px": found.width_px, "orientation": orientation})


def video_slices(task: Task) -> Generator[Answer, None, None]:
    places = task.facts.integer("places", 0, task.numbers.size)
    whole = task.facts.integer("whole", places, 2**31)
    repaired = task.facts.integer("repaired", 0, whole)
    video = PlannedVideo(
        source=task.source,
        index=index_of(task.facts, task.numbers[places:]),
        places=Rest.of(task.numbers[:places].tolist(), whole, repaired),
        slice_frames=task.facts.integer("slice_frames", 1, _MAX_SIDE_PX),
        height_px=task.facts.integer("sent_height_px", 1, _MAX_SIDE_PX),
        width_px=task.facts.integer("sent_width_px", 1, _MAX_SIDE_PX),
    )
    slices = video.slices(task.limits.pixels)
    for _ in range(task.facts.integer("again", 0, whole)):
        next(slices)
    return _answers(slices)


def picture_slices(task: Task) -> Generator[Answer, None, None]:
    sides = (task.facts.integer(name, 1, 2**32) for name in ("height_px", "width_px", "orientation"))
    picture = PlannedPicture(
        source=task.source,
        picture=Picture(*sides),
        height_px=task.facts.integer("sent_height_px", 1, _MAX_SIDE_PX),
        width_px=task.facts.integer("sent_width_px", 1, _MAX_SIDE_PX),
    )
    return _answers(picture.slices())


JOBS: Jobs = {
    "index_video": index_video,
    "index_picture": index_picture,
    "video_slices": video_slices,
    "picture_slices": picture_slices,
}


def main(jobs: Jobs = JOBS) -> None:
    """Serves the connection whose descriptor, limits and service's process id the arguments name."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    limits = Limits(**json.loads(sys.argv[2]))
    _use_blas()
    confine(limits.memory_bytes, int(sys.argv[3]))
    _tell(connection, Kind.READY)
    while True:
        message = _told(connection)
        if message.kind is Kind.JOB:
            _run(connection, message, limits, jobs)
            gc.collect()  # a container and its streams refer to one another
            give_back_freed_memory()


def _use_blas() -> None:
    """It takes room of its own at its first large product, and where there is none it ends the process by itself."""
    large = np.zeros((512, 512), np.float32)
    np.matmul(large, large)


def _run(connection: socket.socket, message: Message, limits: Limits, jobs: Jobs) -> None:
    """Answers a job's NEXTs with its pieces, up to its last, a STOP or a failure."""
    try:
        task = _task(message, limits)
        with closing(jobs[message.facts.text("job")](task)) as answers:
            for _ in range(message.facts.integer("pieces", 0, 2**31)):
                if _told(connection).kind is Kind.STOP:
                    break
                _send_piece(connection, next(answers))
    except FramesieveError as error:
        _fail(connection, error.reason, str(error))
    except MemoryError:
        _fail(connection, "MEMORY", "")
    except Exception:
        _fail(connection, "BUG", traceback.format_exc())
    finally:
        message.close()
    _tell(connection, Kind.DONE)


def _task(message: Message, limits: Limits) -> Task:
    media, numbers = message.descriptors
    name = message.facts.text("media")
    check_file_size(name, media, limits.file_bytes)
    many = np.frombuffer(os.pread(numbers, os.fstat(numbers).st_size, 0), np.int64)
    return Task(Source(name, b"", descriptor=media), limits, message.facts, many)


def _answers(slices: Generator[Slice, None, None]) -> Generator[Answer, None, None]:
    with closing(slices):
        for each in slices:
            names = ("repaired_frames", "decode_s", "resize_s", "decoded_ns", "resized_ns")
            yield Answer({name: getattr(each, name) for name in names}, each.pixels)


def _send_piece(connection: socket.socket, answer: Answer) -> None:
    if not answer.data.size:
        _tell(connection, Kind.PIECE, answer.facts)
        return
    memory = sealed(answer.data.data)
    _tell(connection, Kind.PIECE, answer.facts, memory)
    os.close(memory)


def _fail(connection: socket.socket, reason: str, text: str) -> None:
    _tell(connection, Kind.FAILED, {"reason": reason, "text": text[-MAX_TEXT_CHARACTERS:]})


def _told(connection: socket.socket) -> Message:
    """The next message; without a service there is none, and no reason to be."""
    try:
        return receive(connection)
    except (EOFError, OSError):
        os._exit(0)


def _tell(connection: socket.socket, kind: Kind, facts: Mapping[str, Any] | None = None, *memory: int) -> None:
    """Waits while as many descriptors as a worker may have open are on their way, among all processes of this user."""
    while True:
        try:
            return send(connection, Message(kind, Facts(facts or {}), memory))
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:
                os._exit(0)
        time.sleep(_RETRY_S)
