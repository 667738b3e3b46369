"""A grpc.aio server in a thread of its own, for tests that are no coroutines.

gRPC's server of threads beside grpc.aio in one process has ended pytest by a segmentation fault.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import grpc


@contextmanager
def served(register: Callable[[grpc.aio.Server], object], address: str = "127.0.0.1:0") -> Iterator[str]:
    """Serves what `register` adds, and yields the address, with its port."""
    started: Future[str] = Future()
    stop = threading.Event()

    async def serve() -> None:
        server = grpc.aio.server()
        register(server)
        port = server.add_insecure_port(address)
        await server.start()
        started.set_result(address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}")
        await asyncio.to_thread(stop.wait)
        await server.stop(0)

    thread = threading.Thread(target=asyncio.run, args=(serve(),), name="served")
    thread.start()
    try:
        yield started.result(timeout=20)
    finally:
        stop.set()
        thread.join()
