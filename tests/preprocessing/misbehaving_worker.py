"""The entry module of workers in tests: jobs that crash, hang, leak or break the protocol, beside the real ones."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from gridsieve.common.sealed_memory import sealed
from gridsieve.services.preprocessing.sound.track import decode_sound, read_sound
from gridsieve.services.preprocessing.workers import worker
from gridsieve.services.preprocessing.workers.worker import Piece, Task

MIB = 2**20
MALFORMED = {
    "no json": b"\x80\x04\x95",
    "no object": b"[1, 2]",
    "deep": b"[" * 60_000,
    "a long number": b'{"kind": "piece", "facts": {"n": ' + b"9" * 5000 + b"}}",
    "too long": b" " * 100_000,
    "other keys": b'{"kind": "piece", "facts": {}, "more": 1}',
    "another kind": b'{"kind": "obey", "facts": {}}',
}


def count(task: Task) -> Generator[Piece, None, None]:
    """Numbered pieces of 1 MiB, from `first` on, each of which takes `piece_s` seconds, with or without progress."""
    for number in range(task.facts.integer("first", 0, 2**31), 2**31):
        for _ in range(10):
            time.sleep(task.facts.seconds("piece_s") / 10)
            if task.facts.integer("progress", 0, 1):
                task.progress()
        yield Piece({"number": number, "worker": os.getpid()}, np.full(MIB, number % 256, np.uint8))


def crash(task: Task) -> Generator[Piece, None, None]:
    ctypes.string_at(0)
    yield Piece({})


def hang(task: Task) -> Generator[Piece, None, None]:
    while True:
        time.sleep(1)
    yield Piece({})  # type: ignore[unreachable]


def end(task: Task) -> Generator[Piece, None, None]:
    os._exit(3)
    yield Piece({})  # type: ignore[unreachable]


def bug(task: Task) -> Generator[Piece, None, None]:
    raise ZeroDivisionError("secret detail")
    yield Piece({})  # type: ignore[unreachable]


def fork(task: Task) -> Generator[Piece, None, None]:
    """Crashes, and leaves a child process behind that keeps the connection open."""
    child = os.fork()
    if child == 0:
        signal.pause()
    yield Piece({"child": child})
    os.kill(os.getpid(), signal.SIGSEGV)


def say(task: Task) -> Generator[Piece, None, None]:
    """Sends a message that breaks the protocol, and then hangs."""
    memory = sealed(memoryview(bytes(MIB)))
    everything: dict[str, tuple[bytes, list[int]]] = {
        "no json": (MALFORMED["no json"], []),
        "two arrays": (b'{"kind": "piece", "facts": {}}', [memory, memory]),
        "an end": (b'{"kind": "done", "facts": {}}', []),
        "a failure without reason": (b'{"kind": "failed", "facts": {}}', []),
    }
    data, descriptors = everything[task.facts.text("what")]
    connection = socket.socket(fileno=os.dup(int(sys.argv[1])))
    socket.send_fds(connection, [data], descriptors)
    yield from hang(task)


def confined(task: Task) -> Generator[Piece, None, None]:
    """Reports what the sandbox lets the worker see and reach."""
    yield Piece(
        {
            "proc": _outcome(lambda: Path("/proc/self/status").read_text()),
            "password": _outcome(lambda: Path("/etc/passwd").read_text()),
            "write": _outcome(lambda: Path("/tmp/gridsieve-worker").write_text("")),
            "connect": _outcome(lambda: socket.create_connection(("127.0.0.1", task.facts.integer("port", 1, 65535)))),
            "signal": _outcome(lambda: os.kill(os.getppid(), 0)),
            "descriptors": [each for each in range(1024) if _is_open(each)],
            "core": resource.getrlimit(resource.RLIMIT_CORE)[1],
            "no_new_privileges": ctypes.CDLL(None).prctl(39, 0, 0, 0, 0),
        }
    )


def hear(task: Task) -> Generator[Piece, None, None]:
    """A second of the sound at 16 kHz."""
    index = read_sound(task.source)
    assert index
    yield Piece({}, decode_sound(task.source, index, Fraction(0), Fraction(1), 16_000, task.progress))


def _outcome(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, "?")
    return "done"


def _is_open(descriptor: int) -> bool:
    with suppress(OSError):
        os.fstat(descriptor)
        return True
    return False


def main() -> None:
    own: dict[str, Any] = {each.__name__: each for each in (count, crash, hang, end, bug, fork, say, confined, hear)}
    worker.main({**worker.JOBS, **own})
