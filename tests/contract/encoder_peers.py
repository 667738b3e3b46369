"""Hand-made peers of the encoder: a preprocessing service that keeps the contract or breaks it, and a caller."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import torch
from numpy.typing import NDArray
from prometheus_client import REGISTRY

from common.channels import MAX_RECEIVE_BYTES, error_from_status, open_channel
from common.interceptors import RequestInterceptor
from common.plan import Grid, MediaPlan, Modality, PromptPlan, Run
from common.room import Room
from common.tensors import DType
from common.wire import int32_array, named_media, plan_messages, tensor_chunks
from framesieve.v1 import encoder_pb2_grpc, preprocessing_pb2_grpc, prompt_pb2
from framesieve.v1.encoder_pb2 import EncodePrompt, EncodeRequest, EncodeResponse
from framesieve.v1.preprocessing_pb2 import FramesChunk, PreprocessRequest, PreprocessResponse
from services.encoder.batcher import Batcher
from services.encoder.cache import EmbedsCache
from services.encoder.patches import PatchShape
from services.encoder.servicer import EncoderServicer
from services.encoder.tower import Tower

FINGERPRINT = b"f" * 32
GRID = Grid(4, 2, 3)
TIMEOUT_S = 60


@dataclass(frozen=True, eq=False)
class Media:
    """What a prompt asks about; `embeds` in place of pixels. content: which pixels; unset: its place in the prompt."""

    modality: Modality
    grid: Grid
    embeds: prompt_pb2.MediaEmbeds | None = None
    content: int | None = None


VIDEO = Media(Modality.VIDEO, GRID)
IMAGE = Media(Modality.IMAGE, Grid(1, 3, 2))


# --- a preprocessing service that does as it is told ------------------------------------------------------------


def frame_count(media: Media, patches: PatchShape) -> int:
    if media.embeds is not None:
        return 0
    return 1 if media.modality is Modality.IMAGE else media.grid.t * patches.temporal_patch


def frames_of(media_index: int, media: Media, patches: PatchShape) -> NDArray[np.uint8]:
    sides = (media.grid.h * patches.token_px, media.grid.w * patches.token_px)
    shape = (frame_count(media, patches), *sides, 3)
    return np.random.default_rng(content_of(media_index, media)).integers(0, 256, shape, dtype=np.uint8)


def content_of(media_index: int, media: Media) -> int:
    return media_index if media.content is None else media.content


def content_hash(media_index: int, media: Media) -> bytes:
    content = (media.modality, media.grid, content_of(media_index, media))
    return hashlib.sha256(repr(content).encode()).digest()


def plan_of(media: Sequence[Media], patches: PatchShape, embed_levels: int) -> PromptPlan:
    items, offset = [], 1
    for index, asked in enumerate(media):
        grid, frames = asked.grid, frame_count(asked, patches)
        item = MediaPlan(
            modality=asked.modality,
            grid=grid,
            runs=(Run(offset, grid.tokens),),
            frames=frames,
            frame_height_px=grid.h * patches.token_px if frames else 0,
            frame_width_px=grid.w * patches.token_px if frames else 0,
            seconds_per_grid=Fraction(1) if asked.modality is Modality.VIDEO else None,
            timestamps_s=(),
            content_hash=content_hash(index, asked),
        )
        items.append(item)
        offset += grid.tokens + 1
    positions = np.tile(np.arange(offset, dtype=np.int32), (3, 1))
    return PromptPlan(np.ones(offset, np.int32), positions, tuple(items), embed_levels, FINGERPRINT)


def slice_messages(
    media_index: int, first_frame: int, frames: NDArray[np.uint8], dtype: DType = DType.UINT8
) -> list[PreprocessResponse]:
    chunks = tensor_chunks(dtype, frames.shape, frames.data)
    return [
        PreprocessResponse(frames=FramesChunk(media_index=media_index, first_frame=first_frame, chunk=chunk))
        for chunk in chunks
    ]


def item_messages(media_index: int, media: Media, patches: PatchShape) -> list[PreprocessResponse]:
    frames = frames_of(media_index, media, patches)
    step = patches.temporal_patch
    starts = range(0, len(frames), step)
    return [message for start in starts for message in slice_messages(media_index, start, frames[start : start + step])]


@dataclass
class FakePreprocessing(preprocessing_pb2_grpc.PreprocessingServiceServicer):
    """Keeps the contract, save where a test bends the plan, the frames or the end.

    stall: each selected item, once its first slice is sent, waits for `resumed`. fail: told after that, for items of
    the contents in `failing` alone where there are any.
    """

    patches: PatchShape
    embed_levels: int
    bend_plan: Callable[[PromptPlan], PromptPlan] = lambda plan: plan
    bend_frames: Callable[[list[PreprocessResponse]], list[PreprocessResponse]] = lambda messages: messages
    fail: Exception | None = None
    failing: frozenset[int] = frozenset()
    stall: bool = False
    on_select: Callable[[], None] = lambda: None
    prompts: list[prompt_pb2.Prompt] = field(default_factory=list)
    selected: list[int] = field(default_factory=list)
    stalled: asyncio.Event = field(default_factory=asyncio.Event)
    resumed: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    async def Preprocess(
        self, requests: AsyncIterator[PreprocessRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[PreprocessResponse]:
        first = await anext(requests)
        self.prompts.append(first.prompt)
        media = media_of(first.prompt)
        for plan in plan_messages(self.bend_plan(plan_of(media, self.patches, self.embed_levels))):
            yield PreprocessResponse(plan=plan)
        async for request in requests:
            index = request.select.media_index
            self.selected.append(index)
            self.on_select()
            messages = self.bend_frames(item_messages(index, media[index], self.patches))
            for message in messages[:1]:
                yield message
            if self.stall:
                await self._stall()
            if self.fail and (not self.failing or content_of(index, media[index]) in self.failing):
                raise self.fail
            for message in messages[1:]:
                yield message

    async def _stall(self) -> None:
        self.stalled.set()
        try:
            await asyncio.wait_for(self.resumed.wait(), TIMEOUT_S)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


# --- both services, and a caller --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stack:
    stub: Any
    preprocessing: FakePreprocessing
    tower: Tower
    batcher: Batcher
    cache: EmbedsCache
    outputs: Room

    @property
    def room(self) -> Room:
        """For what is being encoded."""
        return self.cache.room

    @property
    def held_bytes(self) -> int:
        """By requests, encoded and pruned; what is merely kept is not held."""
        return self.room.held_bytes + self.outputs.held_bytes


@asynccontextmanager
async def serving(servicer: Any, add: Callable[[Any, grpc.aio.Server], None], address: str) -> AsyncIterator[Any]:
    server = grpc.aio.server(
        interceptors=[RequestInterceptor()], options=[("grpc.max_receive_message_length", MAX_RECEIVE_BYTES)]
    )
    add(servicer, server)
    server.add_insecure_port(address)
    await server.start()
    try:
        async with open_channel(address) as channel:
            yield channel
    finally:
        await server.stop(0)


@asynccontextmanager
async def running(
    folder: Path, tower: Tower, room_bytes: int = 2**24, budget_tokens: int = 64, cache_bytes: int = 2**24
) -> AsyncIterator[Stack]:
    """The encoder behind a socket in `folder`, and what it talks to."""
    fake, outputs = FakePreprocessing(tower.patches, tower.embed_levels), Room(room_bytes)
    batcher = Batcher(tower.encode, budget_tokens)
    cache = EmbedsCache(tower, batcher, Room(room_bytes), cache_bytes)
    add_fake = preprocessing_pb2_grpc.add_PreprocessingServiceServicer_to_server
    add = encoder_pb2_grpc.add_EncoderServiceServicer_to_server
    try:
        async with serving(fake, add_fake, f"unix:{folder}/p") as upstream:
            servicer = EncoderServicer(FINGERPRINT, cache, outputs, upstream)
            async with serving(servicer, add, f"unix:{folder}/e") as channel:
                stub = encoder_pb2_grpc.EncoderServiceStub(channel)
                yield Stack(stub, fake, tower, batcher, cache, outputs)
    finally:
        batcher.close()


def media_of(prompt: prompt_pb2.Prompt) -> list[Media]:
    """What `prompt_of` was told; files within the prompt are pictures of one token."""
    return [_media_of(modality, media) for _, modality, media in named_media(prompt)]


def _media_of(modality: Modality, part: prompt_pb2.Media) -> Media:
    if part.HasField("embeds"):
        return Media(modality, Grid(part.embeds.grid.t, part.embeds.grid.h, part.embeds.grid.w), part.embeds)
    t, h, w, content = map(int, part.path.split()) if part.path else (1, 1, 1, 0)
    return Media(modality, Grid(t, h, w), content=content)


def prompt_of(media: Sequence[Media], own: Mapping[int, prompt_pb2.Pruning] | None = None) -> prompt_pb2.Prompt:
    parts = []
    for index, asked in enumerate(media):
        item = prompt_pb2.Media(embeds=asked.embeds, pruning=(own or {}).get(index))
        if asked.embeds is None:
            item.path = f"{asked.grid.t} {asked.grid.h} {asked.grid.w} {content_of(index, asked)}"
        video = asked.modality is Modality.VIDEO
        parts.append(prompt_pb2.Part(video=item) if video else prompt_pb2.Part(image=item))
    parts.append(prompt_pb2.Part(text="What moves?"))
    return prompt_pb2.Prompt(messages=[prompt_pb2.Message(role=prompt_pb2.ROLE_USER, parts=parts)])


def first_request(
    media: Sequence[Media], rate: float = 0.0, method: str = "", own: Mapping[int, prompt_pb2.Pruning] | None = None
) -> EncodeRequest:
    pruning = prompt_pb2.Pruning(rate=rate, method=method)
    return EncodeRequest(prompt=EncodePrompt(prompt=prompt_of(media, own), pruning=pruning))


def select(media_index: int) -> EncodeRequest:
    return EncodeRequest(select=prompt_pb2.Select(media_index=media_index))


SELECT_ALL = EncodeRequest(select=prompt_pb2.Select(all=True))


async def encode(stack: Stack, *requests: EncodeRequest) -> list[EncodeResponse]:
    """Everything that a call answers. Raises the leaf of the error tree that its status names."""
    call = stack.stub.Encode(iter(requests), timeout=TIMEOUT_S)
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
    """What was sent of each item, in the order in which it was sent."""
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


async def check_idle(stack: Stack) -> None:
    """Nobody holds or waits for anything, though it may take a moment to be told that a caller is gone."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while counts := {name: count for name, count in in_use(stack).items() if count}:
        assert time.monotonic() < deadline_s, counts
        await asyncio.sleep(0.01)


def in_use(stack: Stack) -> dict[str, float]:
    names = ("reserved_bytes", "output_bytes", "cache_waiters", "queued_slices")
    gauges = {name: REGISTRY.get_sample_value(f"framesieve_encoder_{name}") or 0 for name in names}
    return {**gauges, "room": stack.room.held_bytes, "outputs": stack.outputs.held_bytes}


async def check_served(stack: Stack) -> None:
    """The service is as it was: the next request is decoded and answered, and nothing is held."""
    stack.preprocessing.bend_plan = FakePreprocessing.bend_plan
    stack.preprocessing.bend_frames = FakePreprocessing.bend_frames
    stack.preprocessing.fail = None
    selected = len(stack.preprocessing.selected)
    unseen = replace(VIDEO, content=1000 + len(stack.preprocessing.prompts))
    received = embeds_in(await encode(stack, first_request([unseen]), SELECT_ALL))
    assert stack.preprocessing.selected[selected:] == [0]
    assert received[0].shape == [1 + stack.tower.embed_levels, GRID.tokens, stack.tower.embed_dim]
    await check_idle(stack)
