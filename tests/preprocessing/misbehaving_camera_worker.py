"""The entry module of camera workers in tests, whose decoder does something else than to play."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import sys
import time
from collections.abc import Generator

from gridsieve.common.contract.errors import MediaRejected
from gridsieve.services.preprocessing.workers import worker
from gridsieve.services.preprocessing.workers.bridge import Bridge
from gridsieve.services.preprocessing.workers.protocol import Kind, Message, send
from gridsieve.services.preprocessing.workers.worker import Piece, Task


def _hang(task: Task, own: socket.socket) -> None:
    """Takes nothing of what comes."""
    time.sleep(3600)


def _flood(task: Task, own: socket.socket) -> None:
    """Says without end that it works."""
    with socket.socket(fileno=os.dup(int(sys.argv[1]))) as service:
        while True:
            send(service, Message(Kind.PROGRESS))


def _reach(task: Task, own: socket.socket) -> None:
    """Tells what it can reach beside the bridge, once that carries something."""
    own.sendall(b"?")
    own.recv(1)
    port = int(task.facts.text("target").removeprefix("/reach"))
    found = []
    for address in (("127.0.0.1", port), own.getpeername()):
        try:
            socket.create_connection(address, timeout=5)
        except OSError as error:
            found.append(errno.errorcode[error.errno or 0])
    nowhere = bytes(16)  # the address of no family, AF_UNSPEC, dissolves a connection of TCP
    if ctypes.CDLL(None, use_errno=True).connect(task.camera, nowhere, len(nowhere)):
        found.append(errno.errorcode[ctypes.get_errno()])
    try:
        with socket.socket(fileno=os.dup(task.camera), family=socket.AF_INET, type=socket.SOCK_STREAM) as passed:
            passed.connect(("127.0.0.1", port))
    except OSError as error:
        found.append(errno.errorcode[error.errno or 0])
    raise MediaRejected(f"reaches {found}", field=task.source.name)


def camera_frames(task: Task) -> Generator[Piece, None, None]:
    assert task.listener is not None
    address = task.listener.getsockname()
    connection = socket.socket(fileno=task.camera)
    bridge = Bridge(connection.dup(), task.listener, task.facts.seconds("silent_s"), task.progress)
    with socket.create_connection(address) as own:
        target = task.facts.text("target")
        (_reach if "reach" in target else _flood if "flood" in target else _hang)(task, own)
    bridge.close()
    yield Piece({})


def main() -> None:
    worker.main({"camera_frames": camera_frames}, listens=True)
