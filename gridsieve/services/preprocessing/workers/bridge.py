"""Carries bytes between FFmpeg's RTSP client and a camera that is connected already.

    FFmpeg ─▶ loopback ─▶ Bridge ─▶ the service's socket ─▶ camera
           ◀─          ◀─        ◀─                      ◀─

FFmpeg connects by itself, so it is given a port of this process's own, which takes one connection. What a server says
of other addresses is only text.
"""

from __future__ import annotations

import fcntl
import os
import resource
import select
import socket
import stat
import struct
import termios
import time
from collections.abc import Callable
from contextlib import suppress
from threading import Event, Thread

_PIECE_BYTES = 2**16
_WAIT_S = 0.5
_READ_UP_S = 0.005
_GOODBYE_S = 1.0
# Small, so that a decoder that takes nothing is noticed soon.
_BUFFER_BYTES = 2**16
_REDIRECTION = b"RTSP/1.0 3"


class Bridge:
    """One connection of FFmpeg's to one camera.

    failed: why it ended before FFmpeg did, to follow the name of the stream; empty: it did not.
    """

    def __init__(
        self, camera: socket.socket, listener: socket.socket, silent_s: float, progress: Callable[[], None]
    ) -> None:
        """camera: a socket that speaks with it. silent_s: how long it may send no video. progress: called again and
        again while FFmpeg waits for the camera or takes what it sends.
        """
        self.failed = ""
        self._camera, self._listener, self._silent_s, self._progress = camera, listener, silent_s, progress
        camera.settimeout(_WAIT_S)
        self._video_s = time.monotonic()
        self._ended = Event()
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def see(self, goes_on: bool) -> None:
        """A packet of video came from FFmpeg; or it has read the end of the stream."""
        self._video_s = time.monotonic()
        if not goes_on:
            self._ended.set()

    def close(self) -> None:
        """Returns once everything was passed on that FFmpeg said before it closed its connection."""
        self._thread.join(_WAIT_S)

    def _run(self) -> None:
        client, descriptor = self._accepted()
        if failed := self._carry(client):
            with suppress(OSError):  # FFmpeg has closed it
                while _waiting(client, termios.TIOCOUTQ) or _waiting(descriptor, termios.FIONREAD):
                    time.sleep(_READ_UP_S)
            # A camera that says goodbye may close its connection at once. FFmpeg takes any end for the stream's.
            if not self._ended.wait(_GOODBYE_S):
                self.failed = failed
        client.close()
        self._camera.close()

    def _accepted(self) -> tuple[socket.socket, int]:
        """FFmpeg's connection, and its own descriptor of it. Other processes may see the port, too."""
        while True:
            client, address = self._listener.accept()
            own = _own_end(address)
            if own is not None:
                self._listener.close()
                client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
                return client, own
            client.close()

    def _carry(self, client: socket.socket) -> str:
        """Returns why it ended: empty if FFmpeg closed its connection."""
        while time.monotonic() - self._video_s <= self._silent_s:
            self._progress()
            ready = select.select((client, self._camera), (), (), _WAIT_S)[0]
            if client in ready:
                try:
                    said = client.recv(_PIECE_BYTES)
                except OSError:
                    return ""
                if not said:
                    return ""
                with suppress(OSError):  # what the camera has sent before it went is still read
                    self._camera.sendall(said)
            if self._camera in ready:
                try:
                    data = self._camera.recv(_PIECE_BYTES)
                except OSError:
                    data = b""
                if not data:
                    return "could not be played: the connection broke off"
                if data.startswith(_REDIRECTION):
                    return "redirects to another address, which is not followed"
                try:
                    client.sendall(data)
                except OSError:
                    return ""
        return f"has sent no video for {self._silent_s:g} s"


def _own_end(address: tuple[str, int]) -> int | None:
    """The descriptor of this process's socket with that address."""
    for descriptor in range(resource.getrlimit(resource.RLIMIT_NOFILE)[0]):
        with suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as found:
                if found.family is socket.AF_INET and found.getsockname() == address:
                    found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
                    return descriptor
    return None


def _waiting(descriptor: socket.socket | int, request: int) -> int:
    """Bytes in a socket's buffer."""
    count: int = struct.unpack("i", fcntl.ioctl(descriptor, request, b"\0\0\0\0"))[0]
    return count
