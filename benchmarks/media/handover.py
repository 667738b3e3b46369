"""Embeddings and frames from one service to the next on one host: handed over in shared memory, against messages.

Embeddings go from the encoder's tensor to an item that generation has checked, frames from the memory that a worker
made to bytes that the encoder can read. Theirs is how both travelled before there was shared memory: in pieces of 1 MiB
in gRPC messages, collected in a buffer; and embeddings were hashed, and checked value by value.
One server sends everything over a unix socket: `python -m benchmarks.media.handover ADDRESS TOKENS`.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from fractions import Fraction
from functools import cache, partial
from typing import Any

import grpc
import numpy as np
import torch
from torch import Tensor

from benchmarks.media.streams import in_turns, serve, stream
from benchmarks.table import Row
from gridsieve.common.contract.plan import FrameShape, Grid, MediaPlan, Modality, Run
from gridsieve.common.contract.tensors import DType, TensorBuffer, pieces
from gridsieve.common.contract.wire import add_chunk, buffer_for, fill_chunk, int32_tensor
from gridsieve.common.handover import Receiver, Sender, sender_to
from gridsieve.common.process import keep_freed_memory
from gridsieve.common.sealed_memory import SealedMemory, sealed
from gridsieve.services.encoder.items.item import in_shared_memory
from gridsieve.services.generation.upstream.arriving_item import ArrivingItem, ModelInput
from gridsieve.v1.encoder_pb2 import EmbedsChunk, EncodeResponse, StageAges
from gridsieve.v1.preprocessing_pb2 import PreprocessResponse

# Tokens of 1,024 values with three levels of deepstack, in bfloat16: 82 MB. Where they are pruned, from twice as many.
TOKENS, LEVELS, WIDTH, DTYPE = 10_000, 4, 1024, torch.bfloat16
# 64 slices of two frames: 152 MB.
SLICES, FRAMES_SHAPE = 64, (2, 616, 644, 3)
FRAMES_BYTES = math.prod(FRAMES_SHAPE)
PAGE_BYTES = 4096
AT_MOST = 0.15


def handover(rounds: int) -> list[Row]:
    """Seconds from the call to the last array."""
    return asyncio.run(_handover(rounds, ("all", "kept", "frames"), TOKENS))


def embeds_handover(rounds: int, tokens: int) -> list[Row]:
    """The rows of embeddings, of so many tokens, a multiple of 100. They need no PyAV."""
    return asyncio.run(_handover(rounds, ("all", "kept"), tokens))


async def _handover(rounds: int, kinds: Sequence[str], tokens: int) -> list[Row]:
    every: Mapping[str, Callable[[grpc.aio.Channel], Awaitable[None]]] = {
        "all shared": partial(read_embeds, "All", True, tokens),
        "all": partial(read_embeds, "All", False, tokens),
        "kept shared": partial(read_embeds, "Kept", True, tokens),
        "kept": partial(read_embeds, "Kept", False, tokens),
        "frames shared": partial(read_frames, True),
        "frames": partial(read_frames, False),
    }
    readers = {name: every[name] for kind in kinds for name in (f"{kind} shared", kind)}
    taken, cpu = await in_turns("benchmarks.media.handover", readers, rounds, str(tokens))
    other = "gRPC messages, hashed and checked as before"
    size_mb = 2 * LEVELS * tokens * WIDTH / 1e6
    embeds = f"{size_mb:.0f} MB of embeddings, encoder to generation"
    what = {
        "all": (embeds, other),
        "kept": (f"{embeds}, pruned from {2 * size_mb:.0f} MB", other),
        "frames": ("152 MB of frames, preprocessing to the encoder", "gRPC messages"),
    }
    return [
        Row(
            *what[name],
            taken.median(f"{name} shared"),
            taken.median(name),
            "s",
            at_most=AT_MOST,
            note=f"processor time of both ends in ms: {cpu.median(f'{name} shared') * 1e3:.0f}, messages "
            f"{cpu.median(name) * 1e3:.0f}",
        )
        for name in kinds
    ]


# --- the receivers ----------------------------------------------------------------------------------------------


async def read_embeds(method: str, shares: bool, tokens: int, channel: grpc.aio.Channel) -> None:
    grid = Grid((tokens if method == "All" else 2 * tokens) // 100, 10, 10)
    plan = MediaPlan(
        modality=Modality.VIDEO,
        grid=grid,
        runs=(Run(0, grid.tokens),),
        frames=FrameShape(2 * grid.t, (28 * grid.h, 28 * grid.w)),
        seconds_per_grid=Fraction(1),
        timestamps_s=(),
        content_hash=bytes(32),
    )
    model = ModelInput(bytes(32), 1, WIDTH, LEVELS - 1, DTYPE, torch.device("cpu"))
    if not shares:
        await _as_before(tokens, stream(channel, method, EncodeResponse.FromString))
        return
    receiver = Receiver()
    item = ArrivingItem(0, plan, tokens, model)
    async for response in stream(channel, method, EncodeResponse.FromString, receiver.address):
        item.take_piece(response.embeds, time.monotonic_ns(), receiver.take)
    receiver.close()
    await asyncio.to_thread(item.finish)


async def _as_before(tokens: int, responses: AsyncIterator[EncodeResponse]) -> None:
    buffer: TensorBuffer | None = None
    async for response in responses:
        chunk = response.embeds.chunk
        buffer = buffer or buffer_for(chunk, [DType.BFLOAT16], (LEVELS, tokens, WIDTH))
        add_chunk(buffer, chunk)
    assert buffer is not None
    await asyncio.to_thread(_check_as_before, buffer)


def _check_as_before(buffer: TensorBuffer) -> None:
    hashlib.sha256(buffer.data).digest()
    assert bool(torch.frombuffer(buffer.data, dtype=DTYPE).isfinite().all())


async def read_frames(shares: bool, channel: grpc.aio.Channel) -> None:
    receiver = Receiver() if shares else None
    take = receiver.take if receiver else None
    buffer: TensorBuffer | None = None
    received = 0
    address = receiver.address if receiver else b""
    async for response in stream(channel, "Frames", PreprocessResponse.FromString, address):
        chunk = response.frames.chunk
        buffer = buffer or buffer_for(chunk, [DType.UINT8], FRAMES_SHAPE, take)
        add_chunk(buffer, chunk)
        if buffer.complete:
            np.frombuffer(buffer.data, np.uint8)[::PAGE_BYTES].max()  # shared memory is mapped when it is read
            received, buffer = received + 1, None
    assert received == SLICES
    if receiver:
        receiver.close()


# --- the server -------------------------------------------------------------------------------------------------


async def main(address: str, tokens: int) -> None:
    keep_freed_memory()  # as the services do
    torch.manual_seed(0)
    embeds = torch.randn(LEVELS, 2 * tokens, WIDTH).to(DTYPE)
    half = embeds[:, :tokens].clone()
    kept = torch.randperm(2 * tokens)[:tokens].sort().values.int()

    async def send_all(request: bytes, context: Any) -> AsyncIterator[EncodeResponse]:
        with sender_to(request, "Encode") as sender:
            async for response in _embeds_responses(half, None, sender):
                yield response

    async def send_kept(request: bytes, context: Any) -> AsyncIterator[EncodeResponse]:
        with sender_to(request, "Encode") as sender:
            async for response in _embeds_responses(embeds, kept, sender):
                yield response

    async def send_frames(request: bytes, context: Any) -> AsyncIterator[PreprocessResponse]:
        from gridsieve.services.preprocessing.rpc.messages import frames_responses  # which imports PyAV
        from gridsieve.services.preprocessing.video.slices import Slice

        with sender_to(request, "Encode") as sender:
            for number, memory in enumerate(memories()):
                pixels = memory.mapped(FRAMES_BYTES).reshape(FRAMES_SHAPE)
                each = Slice(2 * number, pixels, 0, 0.0, 0.0, 0, 0, memory)
                shared = bool(sender and await sender.send(memory, FRAMES_BYTES))
                for response in frames_responses(0, each, shared):
                    yield response

    await serve(address, {"All": send_all, "Kept": send_kept, "Frames": send_frames})


async def _embeds_responses(
    embeds: Tensor, kept: Tensor | None, sender: Sender | None
) -> AsyncIterator[EncodeResponse]:
    first = EmbedsChunk(encoding=bytes(32), ages=StageAges())
    if kept is not None:
        first.kept.CopyFrom(int32_tensor(kept.numpy()))
    shape = (LEVELS, embeds.shape[1] if kept is None else len(kept), WIDTH)
    if sender:
        memory = await asyncio.to_thread(in_shared_memory, embeds, kept)
        assert memory is not None
        assert await sender.send(memory, 2 * math.prod(shape))
        fill_chunk(first.chunk, DType.BFLOAT16, shape, 0, None)
        yield EncodeResponse(embeds=first)
        await sender.wait_until_taken()
        return
    sent = embeds if kept is None else await asyncio.to_thread(lambda: embeds[:, kept.long()])
    for offset, piece in pieces(sent.view(torch.uint8).numpy().data):
        response = EncodeResponse(embeds=EmbedsChunk() if offset else first)
        fill_chunk(response.embeds.chunk, DType.BFLOAT16, shape, offset, piece)
        yield response


@cache
def memories() -> list[SealedMemory]:
    """Slices as a worker makes them."""
    return [SealedMemory(sealed(np.full(FRAMES_SHAPE, number, np.uint8).data)) for number in range(SLICES)]


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
