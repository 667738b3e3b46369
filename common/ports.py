"""Ports of this machine for listeners that are yet to start."""

from __future__ import annotations

import random
import socket
from itertools import count

_HOST = "127.0.0.1"
# Below what systems give to outgoing connections: one of those may hold its port for as long as it likes.
_PORTS = range(10_000, 32_768)
_TRIES = 1_000

_places = count(random.randrange(len(_PORTS)))  # noqa: S311  (no secret)


def free_port() -> int:
    """A TCP port of the loopback address on which nothing listens, another with each call. Nothing keeps it free.

    Raises OSError where all that were tried are taken.
    """
    for _ in range(_TRIES):
        port = _PORTS[next(_places) % len(_PORTS)]
        with socket.socket() as probe:
            try:
                probe.bind((_HOST, port))
            except OSError:
                continue
            return port
    raise OSError(f"none of {_TRIES} ports of {_HOST} from {_PORTS.start} to {_PORTS.stop - 1} is free")
