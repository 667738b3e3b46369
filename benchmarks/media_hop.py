"""Sends a tensor of 64 MiB between two processes over gRPC, as services do, against a stream of raw bytes.

Ours is split into TensorChunk messages, sent, and reassembled in a TensorBuffer; a second row wraps each chunk in the
encoder's message. The raw stream sends chunks of the same size without splitting, serialising, parsing or reassembling:
what remains is the cost of gRPC. One server sends both over a unix socket: `python -m benchmarks.media_hop ADDRESS`.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from benchmarks.media_processes import cpu_s
from benchmarks.table import Row, Timings
from framesieve.common.channels import open_channel
from framesieve.common.contract.tensors import PIECE_BYTES, DType, pieces
from framesieve.common.contract.wire import add_chunk, buffer_for, fill_chunk, tensor_chunks
from framesieve.common.process import keep_freed_memory
from framesieve.v1.encoder_pb2 import EmbedsChunk, EncodeResponse
from framesieve.v1.tensor_pb2 import TensorChunk

SERVICE = "benchmarks.Hop"
DTYPE, SHAPE = DType.FLOAT32, (1, 4096, 4096)
SIZE_BYTES = 64 * 2**20
HOPS = 4
AT_LEAST = 0.9


def hop(rounds: int) -> list[Row]:
    """Bytes/s, from the first message to the last."""
    return asyncio.run(_hop(rounds))


async def _hop(rounds: int) -> list[Row]:
    contenders: dict[str, Callable[[grpc.aio.Channel], Awaitable[int]]] = {
        "tensor": read_tensor,
        "embeds": read_embeds,
        "bytes": read_bytes,
    }
    taken, cpu = Timings(), Timings()
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix:{folder}/hop.sock"
        with subprocess.Popen([sys.executable, "-m", "benchmarks.media_hop", address]) as server:
            try:
                async with open_channel(address) as channel:
                    await asyncio.wait_for(channel.channel_ready(), 60)
                    for number in range(rounds + 1):
                        for name, contender in contenders.items():
                            start, cpu_start = time.perf_counter(), cpu_s(server.pid) + time.process_time()
                            received = sum([await contender(channel) for _ in range(HOPS)])
                            seconds = time.perf_counter() - start
                            assert received == HOPS * SIZE_BYTES
                            if number:  # the first is a warm-up
                                taken.add(name, received / seconds)
                                cpu.add(name, (cpu_s(server.pid) + time.process_time() - cpu_start) / received)
            finally:
                server.terminate()
    what = f"{SIZE_BYTES >> 20} MiB in TensorChunks of {PIECE_BYTES >> 20} MiB, one process to another"
    note = "processor time of both ends in ms per MiB: " + ", ".join(
        f"{name} {cpu.median(name) * 2**20 * 1e3:.2f}" for name in contenders
    )
    other, theirs = "a bare gRPC stream of bytes", taken.median("bytes")
    return [
        Row(what, other, taken.median("tensor"), theirs, "bytes/s", at_least=AT_LEAST, note=note),
        Row("the same, each piece in an EncodeResponse", other, taken.median("embeds"), theirs, "bytes/s"),
    ]


async def read_tensor(channel: grpc.aio.Channel) -> int:
    return await _collect(chunk async for chunk in _stream(channel, "Tensor", TensorChunk.FromString))


async def read_embeds(channel: grpc.aio.Channel) -> int:
    return await _collect(each.embeds.chunk async for each in _stream(channel, "Embeds", EncodeResponse.FromString))


async def read_bytes(channel: grpc.aio.Channel) -> int:
    return sum([len(piece) async for piece in _stream(channel, "Bytes", None)])


def _stream(channel: Any, name: str, parse: Callable[[bytes], Any] | None) -> AsyncIterator[Any]:
    return aiter(channel.unary_stream(f"/{SERVICE}/{name}", response_deserializer=parse)(b""))


async def _collect(chunks: AsyncIterator[TensorChunk]) -> int:
    """Reassembles the tensor as receivers do. Returns its number of bytes."""
    buffer = buffer_for(first := await anext(chunks), [DTYPE], SHAPE)
    add_chunk(buffer, first)
    async for chunk in chunks:
        add_chunk(buffer, chunk)
    assert buffer.complete
    return buffer.received_bytes


# --- the server -------------------------------------------------------------------------------------------------


async def serve(address: str) -> None:
    keep_freed_memory()  # as the services do
    data = memoryview(os.urandom(SIZE_BYTES))
    cut = [bytes(piece) for _, piece in pieces(data)]

    async def send_tensor(_: bytes, context: Any) -> AsyncIterator[TensorChunk]:
        for chunk in tensor_chunks(DTYPE, SHAPE, data):
            yield chunk

    async def send_embeds(_: bytes, context: Any) -> AsyncIterator[EncodeResponse]:
        for offset, piece in pieces(data):
            response = EncodeResponse(embeds=EmbedsChunk(media_index=0))
            fill_chunk(response.embeds.chunk, DTYPE, SHAPE, offset, piece)
            yield response

    async def send_bytes(_: bytes, context: Any) -> AsyncIterator[bytes]:
        for piece in cut:
            yield piece

    handlers: dict[str, Any] = {
        "Tensor": grpc.unary_stream_rpc_method_handler(send_tensor, response_serializer=TensorChunk.SerializeToString),
        "Embeds": grpc.unary_stream_rpc_method_handler(
            send_embeds, response_serializer=EncodeResponse.SerializeToString
        ),
        "Bytes": grpc.unary_stream_rpc_method_handler(send_bytes),
    }
    server = grpc.aio.server()
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, handlers)])
    server.add_insecure_port(address)
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
