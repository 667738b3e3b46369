"""The worker process of a camera: it plays RTSP by FFmpeg's client, over a connection that the service has made.

Unlike other workers it may connect to itself, once.
"""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Generator

from framesieve.common.contract.errors import MediaRejected
from framesieve.services.preprocessing.video.stream import played_frames
from framesieve.services.preprocessing.workers import worker
from framesieve.services.preprocessing.workers.bridge import Bridge
from framesieve.services.preprocessing.workers.worker import Piece, Task, frame_pieces

_HANDSHAKE_S = 10.0


def camera_frames(task: Task) -> Generator[Piece, None, None]:
    """The frames of a camera. The media's file holds the authorities that its certificate may be of, in DER."""
    name, facts = task.source.name, task.facts
    assert task.listener is not None
    host, port = task.listener.getsockname()
    url = f"rtsp://{facts.text('login')}{host}:{port}{facts.text('target')}"
    bridge = Bridge(_connection(task), task.listener, facts.seconds("silent_s"), task.came)
    try:
        yield from frame_pieces(played_frames(url, facts.seconds("fps"), name, bridge.see))
        if bridge.failed:
            raise MediaRejected(bridge.failed, field=name)
    except MediaRejected as error:
        raise MediaRejected(bridge.failed, field=name) if bridge.failed else error from None
    finally:
        bridge.close()


def _connection(task: Task) -> socket.socket:
    """The camera's connection; with TLS where the certificate must hold a name."""
    connection = socket.socket(fileno=os.dup(task.camera))
    connection.settimeout(_HANDSHAKE_S)
    if not (host := task.facts.text("tls_host")):
        return connection
    with task.source.open() as file:
        tls = ssl.create_default_context(cadata=file.read())
    try:
        return tls.wrap_socket(connection, server_hostname=host)
    except OSError as error:
        raise MediaRejected("cannot be connected to, or has no valid certificate", field=task.source.name) from error


def main() -> None:
    """Serves a connection, as `worker.main` does."""
    worker.main({"camera_frames": camera_frames}, listens=True)
