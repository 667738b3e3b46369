"""Streams of another process over a unix socket, read in turns: how long each takes, and the processor time of both."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import grpc

from benchmarks.processes import cpu_s
from benchmarks.table import Timings
from gridsieve.common.channels import open_channel
from gridsieve.common.process import keep_freed_memory

SERVICE = "benchmarks.Streams"


async def in_turns(
    module: str, readers: Mapping[str, Callable[[grpc.aio.Channel], Awaitable[None]]], rounds: int, *arguments: str
) -> tuple[Timings, Timings]:
    """Seconds, and seconds of processor time, of each reader. The server is `python -m module ADDRESS ARGUMENTS`."""
    taken, cpu = Timings(), Timings()
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix:{folder}/streams.sock"
        with subprocess.Popen([sys.executable, "-m", module, address, *arguments]) as server:
            try:
                async with open_channel(address) as channel:
                    await asyncio.wait_for(channel.channel_ready(), 60)
                    for number in range(rounds + 1):
                        for name, read in readers.items():
                            start, cpu_start = time.perf_counter(), cpu_s(server.pid) + time.process_time()
                            await read(channel)
                            if number:  # the first is a warm-up
                                taken.add(name, time.perf_counter() - start)
                                cpu.add(name, cpu_s(server.pid) + time.process_time() - cpu_start)
            finally:
                server.terminate()
    return taken, cpu


def stream(
    channel: Any, name: str, parse: Callable[[bytes], Any] | None = None, request: bytes = b""
) -> AsyncIterator[Any]:
    """The server's answers, parsed."""
    return aiter(channel.unary_stream(f"/{SERVICE}/{name}", response_deserializer=parse)(request))


async def serve(address: str, methods: Mapping[str, Callable[[bytes, Any], AsyncIterator[Any]]]) -> None:
    """Serves streams of messages, or of bytes, by name."""
    handlers: dict[str, Any] = {
        name: grpc.unary_stream_rpc_method_handler(send, response_serializer=_serialised)
        for name, send in methods.items()
    }
    server = grpc.aio.server()
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, handlers)])
    server.add_insecure_port(address)
    await server.start()
    await server.wait_for_termination()


def _serialised(message: Any) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()
