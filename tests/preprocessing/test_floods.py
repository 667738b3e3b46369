"""Watch calls to sources that send as many small things as they can. Nobody else must wait for them."""

from __future__ import annotations

import asyncio
import resource
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from tests.certificates import self_signed
from tests.preprocessing.media_server import head
from tests.preprocessing.service import Service
from tests.preprocessing.test_cameras import watching
from tests.preprocessing.test_watch import opened

pytestmark = pytest.mark.asyncio(loop_scope="session")

MOST_S = 0.01
# What is received of a source, beside what its worker has taken.
MOST_KIB = 2**15


def chunks(connection: socket.socket, _: ssl.SSLContext) -> None:
    """HTTP, each byte in a chunk of its own."""
    connection.sendall(head(200, "Transfer-Encoding: chunked"))
    while True:
        connection.sendall(b"1\r\nX\r\n" * 10_000)


def packets(connection: socket.socket, _: ssl.SSLContext) -> None:
    """Empty packets of RTSP."""
    while True:
        connection.sendall(b"$\0\0\0" * 10_000)


def records(connection: socket.socket, tls: ssl.SSLContext) -> None:
    """TLS, each byte in a record of its own."""
    came, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = tls.wrap_bio(came, sent, server_side=True)
    while True:
        with suppress(ssl.SSLWantReadError):
            server.do_handshake()
            break
        connection.sendall(sent.read())
        came.write(connection.recv(2**16))
    while True:
        for _ in range(10_000):
            server.write(b"$")
        connection.sendall(sent.read())


@contextmanager
def flooding(flood: Callable[[socket.socket, ssl.SSLContext], None], tls: ssl.SSLContext) -> Iterator[int]:
    """The port of a server, in a thread, whose processor time is not that of the event loop."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connections: list[socket.socket] = []

        def serve() -> None:
            with suppress(OSError, ssl.SSLError):
                connections.append(listener.accept()[0])
                flood(connections[0], tls)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        for connection in connections:
            with suppress(OSError):  # the other side has ended it
                connection.shutdown(socket.SHUT_RDWR)
        thread.join(10)
        for connection in connections:
            connection.close()


@pytest.mark.parametrize(
    ("scheme", "flood"), [("http", chunks), ("rtsp", packets), ("rtsps", records)], ids=["chunks", "packets", "records"]
)
async def test_a_flood_of_small_things_leaves_the_event_loop_to_others(
    service: Service, tmp_path: Path, scheme: str, flood: Callable[[socket.socket, ssl.SSLContext], None]
) -> None:
    own = self_signed(tmp_path, "clip.test")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(own.cert, own.key)
    with flooding(flood, tls) as port:
        async with watching(service, port, own.cert) as (stub, came):
            watched = await opened(stub, f"{scheme}://clip.test:{port}/")
            while sum(came) < 1000:
                await asyncio.sleep(0.05)
            turns_s = []
            resident_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            began_s, before_s = time.monotonic(), time.thread_time()
            while time.monotonic() - began_s < 1:
                turn_s = time.thread_time()
                await asyncio.sleep(0.001)
                turns_s.append(time.thread_time() - turn_s)
            share = (time.thread_time() - before_s) / (time.monotonic() - began_s)
            watched.call.cancel()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident_kib
    assert grown < MOST_KIB
    # The slowest tenth has what other tests left behind, such as collections of garbage. Each turn took 30 to 130 ms.
    assert np.quantile(turns_s, 0.9) < MOST_S
    assert share < 0.5
