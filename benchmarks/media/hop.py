"""Sends a tensor of 64 MiB between two processes over gRPC, as services do, against a stream of raw bytes.

Ours is split into TensorChunk messages, sent, and reassembled in a TensorBuffer; a second row wraps each chunk in the
encoder's message. The raw stream sends chunks of the same size without splitting, serialising, parsing or reassembling:
what remains is the cost of gRPC. One server sends both over a unix socket: `python -m benchmarks.media.hop ADDRESS`.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import grpc

from benchmarks.media.streams import in_turns, serve, stream
from benchmarks.table import Row
from gridsieve.common.contract.tensors import PIECE_BYTES, DType, pieces
from gridsieve.common.contract.wire import add_chunk, buffer_for, fill_chunk, tensor_chunks
from gridsieve.common.process import keep_freed_memory
from gridsieve.v1.encoder_pb2 import EmbedsChunk, EncodeResponse
from gridsieve.v1.tensor_pb2 import TensorChunk

DTYPE, SHAPE = DType.FLOAT32, (1, 4096, 4096)
SIZE_BYTES = 64 * 2**20
HOPS = 4
AT_LEAST = 0.9


def hop(rounds: int) -> list[Row]:
    """Bytes/s, from the first message to the last."""
    return asyncio.run(_hop(rounds))


async def _hop(rounds: int) -> list[Row]:
    readers = {"tensor": read_tensor, "embeds": read_embeds, "bytes": read_bytes}
    several = {name: partial(read_several, read) for name, read in readers.items()}
    taken, cpu = await in_turns("benchmarks.media.hop", several, rounds)
    received = HOPS * SIZE_BYTES
    what = f"{SIZE_BYTES >> 20} MiB in TensorChunks of {PIECE_BYTES >> 20} MiB, one process to another"
    note = "processor time of both ends in ms per MiB: " + ", ".join(
        f"{name} {cpu.median(name) / received * 2**20 * 1e3:.2f}" for name in readers
    )
    other, theirs = "a bare gRPC stream of bytes", received / taken.median("bytes")
    return [
        Row(what, other, received / taken.median("tensor"), theirs, "bytes/s", at_least=AT_LEAST, note=note),
        Row("the same, each piece in an EncodeResponse", other, received / taken.median("embeds"), theirs, "bytes/s"),
    ]


async def read_several(read: Callable[[grpc.aio.Channel], Awaitable[int]], channel: grpc.aio.Channel) -> None:
    assert sum([await read(channel) for _ in range(HOPS)]) == HOPS * SIZE_BYTES


async def read_tensor(channel: grpc.aio.Channel) -> int:
    return await _collect(chunk async for chunk in stream(channel, "Tensor", TensorChunk.FromString))


async def read_embeds(channel: grpc.aio.Channel) -> int:
    return await _collect(each.embeds.chunk async for each in stream(channel, "Embeds", EncodeResponse.FromString))


async def read_bytes(channel: grpc.aio.Channel) -> int:
    return sum([len(piece) async for piece in stream(channel, "Bytes")])


async def _collect(chunks: AsyncIterator[TensorChunk]) -> int:
    """Reassembles the tensor as receivers do. Returns its number of bytes."""
    buffer = buffer_for(first := await anext(chunks), [DTYPE], SHAPE)
    add_chunk(buffer, first)
    async for chunk in chunks:
        add_chunk(buffer, chunk)
    assert buffer.complete
    return buffer.received_bytes


# --- the server -------------------------------------------------------------------------------------------------


async def main(address: str) -> None:
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

    await serve(address, {"Tensor": send_tensor, "Embeds": send_embeds, "Bytes": send_bytes})


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
