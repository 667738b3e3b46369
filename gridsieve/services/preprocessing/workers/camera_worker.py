"""The worker process of a camera: it plays RTSP by FFmpeg's client, over a connection that the service relays.

Unlike other workers it may connect to itself, once.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Generator

from gridsieve.common.contract.errors import MediaRejected
from gridsieve.services.preprocessing.video.stream import played_frames
from gridsieve.services.preprocessing.workers import worker
from gridsieve.services.preprocessing.workers.bridge import Bridge
from gridsieve.services.preprocessing.workers.worker import Piece, Task, frame_pieces


def camera_frames(task: Task) -> Generator[Piece, None, None]:
    """The frames of a camera. The media's file is empty."""
    name, facts = task.source.name, task.facts
    assert task.listener is not None
    host, port = task.listener.getsockname()
    url = f"rtsp://{facts.text('login')}{host}:{port}{facts.text('target')}"
    bridge = Bridge(socket.socket(fileno=os.dup(task.camera)), task.listener, facts.seconds("silent_s"), task.progress)
    try:
        yield from frame_pieces(played_frames(url, facts.seconds("fps"), name, bridge.see))
        if bridge.failed:
            raise MediaRejected(bridge.failed, field=name)
    except MediaRejected as error:
        raise MediaRejected(bridge.failed, field=name) if bridge.failed else error from None
    finally:
        bridge.close()


def main() -> None:
    """Serves a connection, as `worker.main` does."""
    worker.main({"camera_frames": camera_frames}, listens=True)
