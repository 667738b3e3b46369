"""An encoder service with a tiny tower, a fake preprocessing service, and a client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import torch
from numpy.typing import NDArray
from prometheus_client import REGISTRY

from gridsieve.common.byte_semaphore import ByteSemaphore
from gridsieve.common.channels import error_from_status
from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.wire import int32_array
from gridsieve.common.handover import Receiver
from gridsieve.services.encoder.items.batcher import Batcher
from gridsieve.services.encoder.items.cache import EmbedsCache
from gridsieve.services.encoder.rpc.gauges import watch
from gridsieve.services.encoder.rpc.servicer import EncoderServicer
from gridsieve.services.encoder.tower.loading import load_tower
from gridsieve.services.encoder.tower.parallel.tower import packing_of
from gridsieve.services.encoder.tower.tower import Tower
from gridsieve.v1 import encoder_pb2_grpc, prompt_pb2
from gridsieve.v1.encoder_pb2 import EncodePrompt, EncodeRequest, EncodeResponse
from tests.common.loopback import TIMEOUT_S, eventually, serving
from tests.encoder.encoder_peers import FINGERPRINT, GRID, FakePreprocessing, Media, frames_of, prompt_of, video


def tower_of(checkpoint: Path, dtype: str = "auto") -> Tower:
    torch.set_num_threads(1)
    return load_tower(Checkpoint(checkpoint), dtype, torch.device("cpu"))


@dataclass(frozen=True)
class Stack:
    """An encoder and a client of it."""

    stub: Any
    preprocessing: FakePreprocessing
    tower: Tower
    batcher: Batcher
    cache: EmbedsCache
    output_bytes: ByteSemaphore

    @property
    def encoding_bytes(self) -> ByteSemaphore:
        """For what is being encoded."""
        return self.cache.encoding_bytes

    async def encode(self, *requests: EncodeRequest) -> list[EncodeResponse]:
        return await read_all(self.stub.Encode(iter(requests), timeout=TIMEOUT_S))

    def opened(self, *media: Media, rate: float = 0, timeout_s: float = TIMEOUT_S) -> Any:
        """A call that selects everything, not read yet."""
        return self.stub.Encode(iter([first_request(media, rate), SELECT_ALL]), timeout=timeout_s)

    async def stalled(self, *media: Media, timeout_s: float = TIMEOUT_S) -> Any:
        """A call whose first item is being decoded, one slice of it sent."""
        self.preprocessing.stall = True
        call = self.opened(*media, timeout_s=timeout_s)
        await asyncio.wait_for(self.preprocessing.stalled.wait(), TIMEOUT_S)
        self.preprocessing.stall = False
        return call

    def in_use(self) -> dict[str, float]:
        gauges = {name: metric(name) for name in ("cache_waiters", "queue_slices", "queue_oldest_seconds")}
        for buffer in ("encoding", "output"):
            gauges |= {
                f"{name} {buffer}": metric(name, buffer=buffer) for name in ("buffer_used_bytes", "buffer_waiting")
            }
        return {**gauges, "buffer": self.encoding_bytes.held_bytes, "outputs": self.output_bytes.held_bytes}

    async def check_idle(self) -> None:
        """Waits until nothing is reserved, queued or waited for: a disconnected caller is noticed late."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while counts := {name: count for name, count in self.in_use().items() if count}:
            assert time.monotonic() < deadline_s, counts
            await asyncio.sleep(0.01)

    async def check_served(self) -> None:
        """Checks that the next request is decoded and answered, and that nothing stays reserved."""
        self.preprocessing.bend_plan = FakePreprocessing.bend_plan
        self.preprocessing.bend_frames = FakePreprocessing.bend_frames
        self.preprocessing.fail = None
        # Calls of earlier requests may not have ended in preprocessing yet.
        await eventually(lambda: not REGISTRY.get_sample_value("gridsieve_requests_running", {"method": "Preprocess"}))
        selected = len(self.preprocessing.selected)
        received = embeds_in(await read_all(self.opened(video(1000 + len(self.preprocessing.prompts)))))
        assert self.preprocessing.selected[selected:] == [0]
        assert received[0].shape == [1 + self.tower.embed_levels, GRID.tokens, self.tower.embed_dim]
        await self.check_idle()


@asynccontextmanager
async def running(
    folder: Path, tower: Tower, buffer_bytes: int = 2**24, budget_tokens: int = 64, cache_bytes: int = 2**24
) -> AsyncIterator[Stack]:
    """Serves the encoder and its fake peer on sockets in `folder`."""
    fake, outputs = FakePreprocessing(tower.patches, tower.embed_levels), ByteSemaphore(buffer_bytes)
    batcher = Batcher(tower.encode, packing_of(tower, budget_tokens))
    batcher.start()
    cache = EmbedsCache(tower, batcher, ByteSemaphore(buffer_bytes), cache_bytes)
    watch(batcher, cache, outputs)
    try:
        async with serving(f"unix:{folder}/p", fake) as upstream:
            servicer = EncoderServicer(FINGERPRINT, cache, outputs, upstream, receiver=Receiver)
            async with serving(f"unix:{folder}/e", servicer) as channel:
                yield Stack(encoder_pb2_grpc.EncoderServiceStub(channel), fake, tower, batcher, cache, outputs)
    finally:
        batcher.close()


def first_request(
    media: Sequence[Media], rate: float = 0.0, method: str = "evs", own: Mapping[int, prompt_pb2.Pruning] | None = None
) -> EncodeRequest:
    pruning = prompt_pb2.Pruning(rate=rate, method=method)
    return EncodeRequest(prompt=EncodePrompt(prompt=prompt_of(media, own), pruning=pruning))


def select(media_index: int) -> EncodeRequest:
    return EncodeRequest(select=prompt_pb2.Select(media_index=media_index))


SELECT_ALL = EncodeRequest(select=prompt_pb2.Select(all=True))


async def read_all(call: Any) -> list[EncodeResponse]:
    """All responses of a call. Raises the GridsieveError of its status."""
    try:
        return [response async for response in call]
    except grpc.aio.AioRpcError as error:
        raise error_from_status(error, "encoder") from error


@dataclass
class Received:
    kept: list[int] | None
    shape: list[int]
    data: bytes

    @property
    def embeds(self) -> NDArray[np.float32]:
        return np.frombuffer(self.data, np.float32).reshape(self.shape)


def embeds_in(responses: Sequence[EncodeResponse]) -> dict[int, Received]:
    """The embeddings of each item, in the order in which they were sent."""
    received: dict[int, Received] = {}
    for message in (each.embeds for each in responses if each.HasField("embeds")):
        if message.media_index not in received:
            kept = int32_array(message.kept).tolist() if message.HasField("kept") else None
            received[message.media_index] = Received(kept, list(message.chunk.shape), b"")
        item = received[message.media_index]
        assert message.chunk.offset_bytes == len(item.data)
        item.data += message.chunk.data
    return received


def tower_embeds(tower: Tower, media_index: int, media: Media) -> torch.Tensor:
    """Of an item's frames, unpruned: (1 + embed_levels, tokens, D)."""
    frames = torch.from_numpy(frames_of(media_index, media, tower.patches))
    return torch.cat([tower.encode([each])[0] for each in frames.split(tower.patches.temporal_patch)], dim=1)


def item_bytes(tower: Tower, tokens: int = GRID.tokens) -> int:
    return (1 + tower.embed_levels) * tokens * tower.embed_dim * 4


def kept_bytes(tower: Tower, tokens: int = GRID.tokens) -> int:
    """With scores: five float32 a token at most, for all methods."""
    return item_bytes(tower, tokens) + 20 * tokens


def metric(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"gridsieve_encoder_{name}", labels) or 0


async def waiters(count: int) -> None:
    """Waits until so many requested items wait for an entry of the cache."""
    await eventually(lambda: metric("cache_waiters") == count)
