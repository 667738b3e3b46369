"""The messages between the service and its worker processes; arrays travel as sealed memory (`sealed_memory`).

A malicious file may have taken over the worker that decodes it, so nothing that arrives can run code: each message is
one datagram of JSON with fixed keys, arrays come in sealed memory, and anything else raises PeerContract.

    service  JOB ── NEXT ── NEXT ──────────── NEXT ─── …      one NEXT for each piece that the worker may make
    worker   READY       PIECE 0    PIECE 1         PIECE 2 ── DONE      or FAILED ── DONE

A worker that makes one piece for long sends PROGRESS at most once in PROGRESS_S. One that reads a stream asks for more
of it with READ; DATA answers, with the bytes in sealed memory, or without memory once the stream has ended. One that
plays a camera gets a socket that speaks with it as the third descriptor of JOB.
STOP ends a job before its next piece. A worker without a job ignores NEXT and STOP, which crossed its DONE. One
that cannot start says FAILED in READY's place.
"""

from __future__ import annotations

import array
import json
import os
import socket
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from gridsieve.common.contract.errors import PeerContract

MAX_TEXT_CHARACTERS = 4096
# Of an integer whose range is not known better.
MAX_INT = 2**62

# Seconds from one PROGRESS to the next.
PROGRESS_S = 0.25

_MAX_MESSAGE_BYTES = 2**16
_MAX_DESCRIPTORS = 3


class Kind(StrEnum):
    READY = "ready"
    JOB = "job"
    NEXT = "next"
    STOP = "stop"
    PIECE = "piece"
    PROGRESS = "progress"
    READ = "read"
    DATA = "data"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Facts:
    """A message's named values, unchecked until they are read with one of these methods.

    Reading raises PeerContract for a value that is missing, of another type, or out of range.
    """

    values: Mapping[str, Any] = field(default_factory=dict)

    def integer(self, name: str, low: int, high: int) -> int:
        """An integer in [low, high]."""
        value = self.values.get(name)
        if type(value) is not int or not low <= value <= high:
            raise PeerContract(f"a worker's {name} must be an integer in [{low}, {high}]")
        return value

    def seconds(self, name: str) -> float:
        """A finite float, at least 0."""
        value = self.values.get(name)
        if type(value) is not float or not 0 <= value < float("inf"):
            raise PeerContract(f"a worker's {name} must be seconds")
        return value

    def text(self, name: str) -> str:
        value = self.values.get(name)
        if not isinstance(value, str) or len(value) > MAX_TEXT_CHARACTERS:
            raise PeerContract(f"a worker's {name} must be text of at most {MAX_TEXT_CHARACTERS} characters")
        return value

    def names(self, name: str, known: Collection[str]) -> frozenset[str]:
        """Some of the known names."""
        values = self.values.get(name)
        if not isinstance(values, list) or len(values) > len(known) or not all(each in known for each in values):
            raise PeerContract(f"a worker's {name} must be some of {', '.join(known)}")
        return frozenset(values)

    def integers(self, name: str, max_count: int, low: int, high: int) -> tuple[int, ...]:
        """At most `max_count` integers, each in [low, high]."""
        values = self.values.get(name)
        if not isinstance(values, list) or len(values) > max_count:
            raise PeerContract(f"a worker's {name} must be at most {max_count} integers")
        return tuple(Facts({name: value}).integer(name, low, high) for value in values)


@dataclass(frozen=True, slots=True)
class Message:
    """One datagram.

    descriptors: open ones, which the receiver closes. truncated: the kernel dropped further descriptors, because this
    process had none free or because there were too many.
    """

    kind: Kind
    facts: Facts = field(default_factory=Facts)
    descriptors: tuple[int, ...] = ()
    truncated: bool = False

    def close(self) -> None:
        close_all(self.descriptors)


def send(connection: socket.socket, message: Message) -> None:
    """Sends a message with copies of its descriptors; the caller's stay open.

    Raises OSError if the other side is gone or does not read.
    """
    data = json.dumps({"kind": message.kind, "facts": message.facts.values}).encode()
    socket.send_fds(connection, [data], message.descriptors)


def receive(connection: socket.socket) -> Message:
    """The next message. Raises EOFError at the end, PeerContract for a malformed message; leaks no descriptor."""
    room = socket.CMSG_SPACE(_MAX_DESCRIPTORS * array.array("i").itemsize)
    try:
        data, ancillary, flags, _ = connection.recvmsg(_MAX_MESSAGE_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError as error:
        raise EOFError from error
    descriptors = array.array("i")
    for level, type_, content in ancillary:
        if (level, type_) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
    try:
        if flags & socket.MSG_TRUNC:
            raise PeerContract("a worker's message is too long")
        if not data:
            raise EOFError
        kind, facts = _parsed(data)
    except BaseException:
        close_all(descriptors)
        raise
    return Message(kind, facts, tuple(descriptors), bool(flags & socket.MSG_CTRUNC))


def _parsed(data: bytes) -> tuple[Kind, Facts]:
    try:
        content = json.loads(data)
        if content.keys() != {"kind", "facts"} or not isinstance(content["facts"], dict):
            raise ValueError("other keys")
        return Kind(content["kind"]), Facts(content["facts"])
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise PeerContract(f"a worker sent a malformed message: {error!r}") from error


def close_all(descriptors: tuple[int, ...] | array.array[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
