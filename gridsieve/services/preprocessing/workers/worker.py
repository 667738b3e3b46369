"""A worker process: reads, indexes and decodes untrusted media, one job at a time, until its service is gone.

Media arrive as open files, arrays leave in sealed memory, and the `JOBS` table lists everything that it can do.
`process` starts it without the service's memory, environment and descriptors.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import select
import socket
import sys
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import Any, TypeAlias

import av.subtitles.stream  # noqa: F401  PyAV 18.1 imports it with the first stream, when no more files may be read
import numpy as np
from numpy.typing import NDArray

from gridsieve.common.contract.errors import GridsieveError, MediaRejected, StartupError
from gridsieve.common.contract.plan import MAX_FRAME_SIDE_PX, SizePx
from gridsieve.common.process import give_back_freed_memory
from gridsieve.common.sealed_memory import sealed
from gridsieve.services.preprocessing.sound.features import LogMel, ParakeetMel
from gridsieve.services.preprocessing.sound.planned import PlannedSound
from gridsieve.services.preprocessing.sound.track import read_sound
from gridsieve.services.preprocessing.sources.source import Source, check_file_size
from gridsieve.services.preprocessing.video.card import Card
from gridsieve.services.preprocessing.video.packets import PacketIndex, read_packets
from gridsieve.services.preprocessing.video.pictures import PictureIndex, read_pictures
from gridsieve.services.preprocessing.video.shots import find_shots
from gridsieve.services.preprocessing.video.slices import PlannedVideo, Slice
from gridsieve.services.preprocessing.video.stream import StreamFrame, stream_frames
from gridsieve.services.preprocessing.workers.indexes import (
    index_facts,
    index_of,
    picture_index_facts,
    picture_index_of,
    signed_fraction,
    sound_index_facts,
    sound_index_of,
)
from gridsieve.services.preprocessing.workers.jobs import sent_of
from gridsieve.services.preprocessing.workers.limits import Limits, confine
from gridsieve.services.preprocessing.workers.protocol import (
    MAX_INT,
    MAX_TEXT_CHARACTERS,
    PROGRESS_S,
    Facts,
    Kind,
    Message,
    receive,
    send,
)

_MAX_SLICE_FRAMES, _MAX_THREADS = 2**16, 64
_RETRY_S = 0.01
_IDLE_S = 2.0
_FEATURES: Mapping[str, Any] = {each.__name__: each for each in (LogMel, ParakeetMel)}


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """A job as it arrived: the media, its fields, and an array of numbers, int64 [N].

    progress: says that it works. more: waits for the next bytes of a stream; empty once it has ended. camera: the
    descriptor of a socket that speaks with a camera. listener: on the one port to which this process may connect. card:
    which decodes.
    """

    source: Source
    limits: Limits
    facts: Facts
    numbers: NDArray[np.int64]
    progress: Callable[[], None]
    more: Callable[[], bytes]
    camera: int
    listener: socket.socket | None
    card: Card | None


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """One piece of a job's result: its fields, and an array, which may be empty."""

    facts: Mapping[str, Any]
    data: NDArray[Any] = field(default_factory=lambda: np.empty(0, np.uint8))


JobTable: TypeAlias = Mapping[str, Callable[[Task], Generator[Piece, None, None]]]


def index_video(task: Task) -> Generator[Piece, None, None]:
    index = read_packets(task.source)
    frames, length_s = len(index.times.ticks), index.times.length_s
    if frames > task.limits.frames:
        raise MediaRejected(f"has {frames} frames, at most {task.limits.frames} are allowed", field=task.source.name)
    _check_length(task, length_s)
    yield Piece(*index_facts(index))


def index_sound(task: Task) -> Generator[Piece, None, None]:
    index = read_sound(task.source)
    if index is not None:
        _check_length(task, index.duration_s)
    yield Piece(sound_index_facts(index))


def _check_length(task: Task, length_s: Fraction) -> None:
    if length_s > task.limits.length_s:
        text = f"lasts {float(length_s):.0f} s, at most {task.limits.length_s} are allowed"
        raise MediaRejected(text, field=task.source.name)


def index_pictures(task: Task) -> Generator[Piece, None, None]:
    yield Piece(picture_index_facts(read_pictures(task.source, task.numbers.tolist(), task.progress)))


def find_shots_of(task: Task) -> Generator[Piece, None, None]:
    index = index_of(task.facts, task.numbers)
    end = task.facts.integer("end", 1, len(index.times.ticks))
    shots = find_shots(task.source, index, task.facts.integer("begin", 0, end - 1), end, task.progress, task.card)
    yield Piece({}, np.asarray(shots, np.int64))


def sound_features(task: Task) -> Generator[Piece, None, None]:
    index = sound_index_of(task.facts)
    assert index is not None
    begin_s, samples = signed_fraction(task.facts, "begin_s"), task.facts.integer("samples", 1, MAX_INT)
    log_mel = _FEATURES[task.facts.text("features")](**task.facts.values["log_mel"])
    sound = PlannedSound(task.source, index, begin_s, samples, log_mel)
    yield from _pieces(sound.slices(task.progress))


def video_slices(task: Task) -> Generator[Piece, None, None]:
    return _slices(task, lambda numbers: index_of(task.facts, numbers))


def picture_frames(task: Task) -> Generator[Piece, None, None]:
    return _slices(task, lambda numbers: picture_index_of(task.facts, tuple(numbers.tolist())))


def _slices(
    task: Task, index: Callable[[NDArray[np.int64]], PacketIndex | PictureIndex]
) -> Generator[Piece, None, None]:
    """The slices of a video. index: makes its index from the numbers after the places."""
    places = task.facts.integer("places", 0, task.numbers.size)
    whole = task.facts.integer("whole", places, 2**31)
    repaired = task.facts.integer("repaired", 0, whole)
    size_px, views, dtype = sent_of(task.facts)
    video = PlannedVideo(
        source=task.source,
        index=index(task.numbers[places:]),
        places=tuple(task.numbers[:places].tolist()),
        slice_frames=task.facts.integer("slice_frames", 1, _MAX_SLICE_FRAMES),
        size_px=size_px,
        views=views,
        tile_px=_tile_px(task.facts),
        dtype=dtype,
    )
    threads = task.facts.integer("threads", 1, _MAX_THREADS)
    slices = video.slices(task.progress, whole, repaired, threads, task.card)
    for _ in range(task.facts.integer("again", 0, whole * len(views))):
        next(slices)
    return _pieces(slices)


def watched_frames(task: Task) -> Generator[Piece, None, None]:
    """The frames of a stream, which comes in answer to READ. The media's file is empty."""
    live, jpegs = (bool(task.facts.values[name]) for name in ("live", "jpegs"))
    return frame_pieces(stream_frames(task.more, task.facts.seconds("fps"), task.source.name, live, jpegs))


def frame_pieces(frames: Iterable[StreamFrame]) -> Generator[Piece, None, None]:
    for frame in frames:
        height, width, _ = frame.pixels.shape
        facts = {"time_us": frame.time_us, "height_px": height, "width_px": width}
        if frame.filmed_us is not None:
            facts["filmed_us"] = frame.filmed_us
        yield Piece(facts, frame.pixels)


def _tile_px(facts: Facts) -> SizePx | None:
    size_px = facts.integers("tile_px", 2, 1, MAX_FRAME_SIDE_PX)
    return (size_px[0], size_px[1]) if size_px else None


JOBS: JobTable = {
    "index_video": index_video,
    "index_pictures": index_pictures,
    "index_sound": index_sound,
    "find_shots": find_shots_of,
    "sound_features": sound_features,
    "video_slices": video_slices,
    "picture_frames": picture_frames,
    "watched_frames": watched_frames,
}


def main(jobs: JobTable = JOBS, listens: bool = False, on_card: bool = False) -> None:
    """Serves a connection. Arguments: its descriptor, the limits as JSON, and the service's process id.

    listens: see `confine`. on_card: a card decodes videos. Returns if there is none.
    """
    connection = socket.socket(fileno=int(sys.argv[1]))
    limits = Limits(**json.loads(sys.argv[2]))
    confined = confine(limits.memory_bytes, int(sys.argv[3]), listens, on_card)
    try:
        card = Card() if on_card else None
    except StartupError as error:
        return _fail(connection, "STARTUP", str(error))
    task_of = partial(_task, limits, connection, confined.listener, card)
    gc.freeze()  # what is imported stays, and the collections below need not look at it
    _send(connection, Kind.READY, {"confined_by": confined.by})
    holds_freed = False  # which the next job reuses if it comes soon
    while True:
        if holds_freed and not select.select((connection,), (), (), _IDLE_S)[0]:
            give_back_freed_memory()
            holds_freed = False
        message = _receive(connection)
        if message.kind is Kind.JOB:
            _run(connection, message, jobs, task_of)
            if card and card.lost:
                os._exit(1)  # before DONE, after which it would get another job
            _send(connection, Kind.DONE)
            gc.collect()  # PyAV's containers and streams are reference cycles
            holds_freed = True


def _run(connection: socket.socket, message: Message, jobs: JobTable, task_of: Callable[[Message], Task]) -> None:
    """Answers each NEXT of a job with a piece, until its last piece, a STOP or a failure."""
    try:
        task = task_of(message)
        with closing(jobs[message.facts.text("job")](task)) as pieces:
            for _ in range(message.facts.integer("pieces", 0, 2**31)):
                if _receive(connection).kind is Kind.STOP or (piece := next(pieces, None)) is None:
                    break
                _send_piece(connection, piece)
    except GridsieveError as error:
        facts = {name: getattr(error, name) or "" for name in ("field", "value", "limit", "remedy")}
        _fail(connection, error.reason, error.message, **facts)
    except MemoryError:
        _fail(connection, "MEMORY", "")
    except Exception:
        _fail(connection, "BUG", traceback.format_exc())
    finally:
        message.close()


def _progress(connection: socket.socket) -> Callable[[], None]:
    """A function that sends PROGRESS, unless it did so within PROGRESS_S."""
    sent_s = time.monotonic()

    def progress() -> None:
        nonlocal sent_s
        now_s = time.monotonic()
        if now_s - sent_s >= PROGRESS_S:
            sent_s = now_s
            _send(connection, Kind.PROGRESS)

    return progress


def _more(connection: socket.socket) -> bytes:
    """Asks for the next bytes of a stream, and waits for them."""
    _send(connection, Kind.READ)
    answer = _receive(connection)
    try:
        return b"".join(os.pread(each, os.fstat(each).st_size, 0) for each in answer.descriptors)
    finally:
        answer.close()


def _task(
    limits: Limits, connection: socket.socket, listener: socket.socket | None, card: Card | None, message: Message
) -> Task:
    media, numbers, *camera = message.descriptors
    name = message.facts.text("media")
    check_file_size(name, media, limits.file_bytes)
    return Task(
        source=Source(name, b"", descriptor=media),
        limits=limits,
        facts=message.facts,
        numbers=np.frombuffer(os.pread(numbers, os.fstat(numbers).st_size, 0), np.int64),
        progress=_progress(connection),
        more=partial(_more, connection),
        camera=camera[0] if camera else -1,
        listener=listener,
        card=card,
    )


def _pieces(slices: Generator[Slice, None, None]) -> Generator[Piece, None, None]:
    with closing(slices):
        for each in slices:
            names = ("repaired_frames", "decode_s", "resize_s", "decoded_ns", "resized_ns")
            yield Piece({name: getattr(each, name) for name in names}, each.pixels)


def _send_piece(connection: socket.socket, piece: Piece) -> None:
    if not piece.data.size:
        _send(connection, Kind.PIECE, piece.facts)
        return
    memory = sealed(piece.data.data)
    _send(connection, Kind.PIECE, piece.facts, memory)
    os.close(memory)


def _fail(connection: socket.socket, reason: str, text: str, **facts: str) -> None:
    """facts: of an error about the media, that are there."""
    _send(connection, Kind.FAILED, {"reason": reason, "text": text[-MAX_TEXT_CHARACTERS:], **facts})


def _receive(connection: socket.socket) -> Message:
    """The service's next message. Ends this process if the service is gone."""
    try:
        return receive(connection)
    except (EOFError, OSError):
        os._exit(0)


def _send(connection: socket.socket, kind: Kind, facts: Mapping[str, Any] | None = None, *memory: int) -> None:
    """Sends a message.

    Linux counts descriptors in flight per user and refuses more than a process may have open: then it tries again.
    Ends this process if the service is gone.
    """
    while True:
        try:
            return send(connection, Message(kind, Facts(facts or {}), memory))
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:
                os._exit(0)
        time.sleep(_RETRY_S)
