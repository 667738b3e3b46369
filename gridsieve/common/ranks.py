"""Worker processes (ranks) that compute together with a service. The service is rank 0 and sends them messages.

    service, rank 0 ──▶ rank 1: python -m MODULE 7      a socket for each, here descriptor 7 of the worker
                    ──▶ rank 2: python -m MODULE 9

The service is notified when a rank ends unexpectedly. A rank ends at once when its service has ended, also while it
computes or starts. Ranks are started, never forked. This module knows neither torch nor what is computed.
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
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from gridsieve.common.process import when_parent_ends

_LENGTH = struct.Struct(">Q")
_EXIT_S = 5.0

T = TypeVar("T")


class Ranks:
    """Ranks 1 to count − 1. It must be closed."""

    def __init__(self, module: str, count: int, facts: Mapping[str, object], on_lost: Callable[[str], None]) -> None:
        """module: what each rank runs; its `main` creates `Orders`.

        facts: the first message of each rank, as JSON, with its `rank`, the number of `ranks` and the pid of the
        `service` added.
        on_lost: called, from another thread, with a description of a rank that ended unexpectedly.
        """
        self._on_lost = on_lost
        self._closing = False
        self._ranks = [_Rank(module, number) for number in range(1, count)]
        for each in self._ranks:
            first = {**facts, "rank": each.number, "ranks": count, "service": os.getpid()}
            with suppress(OSError):  # it has ended already, which `_watch` reports
                each.send(json.dumps(first).encode())
        self._watching = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watching.start()

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(each.process.pid for each in self._ranks)

    def broadcast(self, message: bytes) -> None:
        """Sends to every rank. Raises OSError if one has ended."""
        for each in self._ranks:
            each.send(message)

    def send(self, rank: int, message: bytes) -> None:
        """Sends to one rank. Raises OSError if it has ended."""
        self._ranks[rank - 1].send(message)

    def receive(self, rank: int, within_s: float | None = None) -> bytes:
        """Receives the next answer of a rank. Raises OSError if the rank ends, TimeoutError after `within_s`."""
        received = self._ranks[rank - 1].receive(within_s)
        if received is None:
            raise ConnectionResetError(f"rank {rank} has ended")
        return received

    def kill(self) -> None:
        """Kills all ranks. `on_lost` is called as for any other end."""
        for each in self._ranks:
            each.process.kill()

    def close(self) -> None:
        """Ends all ranks: those that wait for a message end by themselves, the others are killed after 5 s."""
        self._closing = True
        for each in self._ranks:
            each.disconnect()
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
    """A rank's side of the connection. It ignores the signals on which the service drains.

    facts: the first message; empty if the service has ended meanwhile.
    """

    def __init__(self, descriptor: int) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        self._connection = socket.socket(fileno=descriptor)
        first = self.receive()
        self.facts: dict[str, Any] = {} if first is None else json.loads(first)
        if self.facts:
            when_parent_ends(self.facts["service"], partial(os._exit, 1))

    def receive(self) -> bytes | None:
        """Waits for the next message; None once the connection is closed."""
        return _receive(self._connection)

    def answer(self, message: bytes) -> None:
        """Sends to the service. Raises OSError if it has ended."""
        _send(self._connection, message)


class _Rank:
    def __init__(self, module: str, number: int) -> None:
        self.number = number
        self._connection, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(  # noqa: S603  (the command is fixed)
                # -P, if the service has it: do not import from the working directory.
                [sys.executable, *(["-P"] if sys.flags.safe_path else []), "-m", module, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C in a terminal is for the service only
            )
        self.handle = os.pidfd_open(self.process.pid)

    def send(self, message: bytes) -> None:
        _send(self._connection, message)

    def receive(self, within_s: float | None) -> bytes | None:
        self._connection.settimeout(within_s)
        try:
            return _receive(self._connection)
        finally:
            self._connection.settimeout(None)

    def disconnect(self) -> None:
        self._connection.close()

    def end(self, until: float) -> None:
        """Waits for the end of the process, and kills it at `until`, in seconds of the monotonic clock."""
        try:
            self.process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def how_it_ended(self) -> str:
        status = self.process.wait()
        return f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"


def meeting_place() -> Path:
    """An empty in-memory file for torch's FileStore, by which ranks find each other. It disappears with this process.

    It must not be closed earlier: torch reopens it when the store is garbage-collected, and aborts the process if the
    descriptor then belongs to something else.
    """
    return Path(f"/proc/{os.getpid()}/fd/{os.memfd_create('gridsieve-ranks')}")


def heeding_signals(wait: Callable[[], T]) -> T:
    """Runs a call that blocks outside of Python in another thread, so that this one can handle signals meanwhile."""
    with ThreadPoolExecutor(1) as aside:
        return aside.submit(wait).result()


def _send(connection: socket.socket, message: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(message)) + message)


def _receive(connection: socket.socket) -> bytes | None:
    """Waits for the next message; None once the connection is closed."""
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
