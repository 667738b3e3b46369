"""The processes that compute together with a service: it is rank 0, starts the others, tells them what to do.

    service, rank 0 ──▶ rank 1: python -m MODULE 7      a socket each, which is descriptor 7 there
                    ──▶ rank 2: python -m MODULE 9

Its service hears of a rank that ends unasked; a rank whose service has ended ends at once, whatever it computes, or as
soon as it has started. They are started, never forked. It knows neither torch nor what is computed.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

_LENGTH = struct.Struct(">Q")
_EXIT_S = 5.0

T = TypeVar("T")


class Ranks:
    """Ranks 1 to count − 1, from their start to `close`, which must be called."""

    def __init__(self, module: str, count: int, facts: Mapping[str, object], on_lost: Callable[[str], None]) -> None:
        """module: what each runs, whose `main` makes `Orders`.

        facts: what each is told first, as JSON, beside its own `rank`, how many `ranks` there are, and the process of
        the `service`.
        on_lost: told which rank ended unasked, and how, in a thread of its own.
        """
        self._on_lost = on_lost
        self._closing = False
        self._ranks = [_Rank(module, number) for number in range(1, count)]
        for each in self._ranks:
            told = {**facts, "rank": each.number, "ranks": count, "service": os.getpid()}
            with suppress(OSError):  # it has ended already, and is watched
                each.tell(json.dumps(told).encode())
        self._watching = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watching.start()

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(each.process.pid for each in self._ranks)

    def tell(self, message: bytes) -> None:
        """To every rank, in order. Raises OSError if one has ended."""
        for each in self._ranks:
            each.tell(message)

    def tell_one(self, rank: int, message: bytes) -> None:
        """To one rank. Raises OSError if it has ended."""
        self._ranks[rank - 1].tell(message)

    def hear(self, rank: int, within_s: float | None = None) -> bytes:
        """What a rank answers next, if need be however long that takes. Raises OSError if it ends or stands still."""
        heard = self._ranks[rank - 1].hear(within_s)
        if heard is None:
            raise ConnectionResetError(f"rank {rank} has ended")
        return heard

    def kill(self) -> None:
        """Ends all of them at once, which is told as any end is."""
        for each in self._ranks:
            each.process.kill()

    def close(self) -> None:
        """Ends them: those that wait to be told by themselves, others after a while."""
        self._closing = True
        for each in self._ranks:
            each.hang_up()
        until = time.monotonic() + _EXIT_S
        for each in self._ranks:
            each.end(until)
        self._watching.join()
        for each in self._ranks:
            os.close(each.handle)

    def _watch(self) -> None:
        if not self._ranks:
            return
        ends = select.poll()
        for each in self._ranks:
            ends.register(each.handle, select.POLLIN)
        ended = {handle for handle, _ in ends.poll()}
        if self._closing:
            return
        lost = next(each for each in self._ranks if each.handle in ended)
        self._on_lost(f"rank {lost.number} of {len(self._ranks) + 1} {lost.how_it_ended()}")


class Orders:
    """A rank's end: what its service tells it. Signals that the service drains on are not for it.

    facts: none if the service has ended meanwhile.
    """

    def __init__(self, descriptor: int) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        self._connection = socket.socket(fileno=descriptor)
        first = self.receive()
        self.facts: dict[str, Any] = {} if first is None else json.loads(first)
        if self.facts:
            parent = os.pidfd_open(os.getppid())
            if os.getppid() != self.facts["service"]:  # which has ended since it said so, and this is whoever took over
                os._exit(1)
            threading.Thread(target=_end_with, args=(parent,), name="service", daemon=True).start()

    def receive(self) -> bytes | None:
        """The next message, once there is one; None when there will be none."""
        return _receive(self._connection)

    def answer(self, message: bytes) -> None:
        """Tells the service, which hears it when it listens. Raises OSError if there is none."""
        _send(self._connection, message)


class _Rank:
    def __init__(self, module: str, number: int) -> None:
        self.number = number
        self._connection, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(  # noqa: S603  (a command of our own)
                # Without what lies in the working directory, where the service is started so.
                [sys.executable, *(["-P"] if sys.flags.safe_path else []), "-m", module, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # a terminal's Ctrl-C is for the service
            )
        self.handle = os.pidfd_open(self.process.pid)

    def tell(self, message: bytes) -> None:
        _send(self._connection, message)

    def hear(self, within_s: float | None) -> bytes | None:
        self._connection.settimeout(within_s)
        try:
            return _receive(self._connection)
        finally:
            self._connection.settimeout(None)

    def hang_up(self) -> None:
        self._connection.close()

    def end(self, until: float) -> None:
        """until: when it is ended if it has not by itself, in seconds of the monotonic clock."""
        try:
            self.process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def how_it_ended(self) -> str:
        status = self.process.wait()
        return f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"


def meeting_place() -> Path:
    """An empty file by which ranks find each other. It is in memory, and gone with this process however that ends.

    Not before: torch writes to it once more when what met there is collected, whenever that is, and ends the process
    where its descriptor has become another's by then.
    """
    return Path(f"/proc/{os.getpid()}/fd/{os.memfd_create('framesieve-ranks')}")


def heeding_signals(wait: Callable[[], T]) -> T:
    """What a call returns or raises that waits outside of Python, where this thread would learn of no signal."""
    with ThreadPoolExecutor(1) as aside:
        return aside.submit(wait).result()


def _send(connection: socket.socket, message: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(message)) + message)


def _receive(connection: socket.socket) -> bytes | None:
    """The next message, once there is one; None when there will be none."""
    head = _read(connection, _LENGTH.size)
    return None if head is None else _read(connection, _LENGTH.unpack(head)[0])


def _read(connection: socket.socket, size: int) -> bytes | None:
    data, filled = bytearray(size), 0
    while filled < size:
        got = connection.recv_into(memoryview(data)[filled:])
        if not got:
            return None
        filled += got
    return bytes(data)


def _end_with(service: int) -> None:
    """Ends this process once another has, by its pidfd."""
    ends = select.poll()
    ends.register(service, select.POLLIN)
    ends.poll()
    os._exit(1)
