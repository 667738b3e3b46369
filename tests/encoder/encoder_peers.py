"""A fake preprocessing service that keeps the contract or breaks it, and the prompts that it understands."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import grpc
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gridsieve.common.contract.plan import FrameShape, Grid, MediaPlan, Modality, PromptPlan, Run
from gridsieve.common.contract.tensors import DType
from gridsieve.common.contract.wire import grid_message, int32_tensor, named_media, plan_messages, tensor_chunks
from gridsieve.common.handover import Sender, sender_to
from gridsieve.common.sealed_memory import SealedMemory
from gridsieve.services.encoder.tower.patches import PatchShape
from gridsieve.v1 import preprocessing_pb2_grpc, prompt_pb2, tensor_pb2
from gridsieve.v1.preprocessing_pb2 import FramesChunk, PreprocessRequest, PreprocessResponse
from tests.common.loopback import TIMEOUT_S

FINGERPRINT = b"f" * 32
GRID = Grid(4, 2, 3)
WIRE_DTYPES = {
    torch.float32: tensor_pb2.DTYPE_FLOAT32,
    torch.float16: tensor_pb2.DTYPE_FLOAT16,
    torch.bfloat16: tensor_pb2.DTYPE_BFLOAT16,
}


@dataclass(frozen=True, eq=False)
class Media:
    """A media item of a prompt. embeds: instead of pixels. content: their seed; None: its place in the prompt."""

    modality: Modality
    grid: Grid
    embeds: prompt_pb2.MediaEmbeds | None = None
    content: int | None = None


VIDEO = Media(Modality.VIDEO, GRID)
IMAGE = Media(Modality.IMAGE, Grid(1, 3, 2))


def video(content: int, grid: Grid = GRID) -> Media:
    return Media(Modality.VIDEO, grid, content=content)


def tensor_message(tensor: Tensor) -> tensor_pb2.Tensor:
    data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return tensor_pb2.Tensor(dtype=WIRE_DTYPES[tensor.dtype], shape=tensor.shape, data=data)


def media_with(tensor: tensor_pb2.Tensor, grid: Grid = GRID, modality: Modality = Modality.VIDEO) -> Media:
    base = prompt_pb2.Rational(numerator=1, denominator=1) if modality is Modality.VIDEO else None
    return Media(modality, grid, prompt_pb2.MediaEmbeds(tensor=tensor, grid=grid_message(grid), seconds_per_grid=base))


def brought(embeds: Tensor, grid: Grid = GRID) -> Media:
    """A video whose embeddings, (1 + levels, tokens, D), come with the prompt."""
    return media_with(tensor_message(embeds), grid)


# --- prompts ----------------------------------------------------------------------------------------------------


def media_of(prompt: prompt_pb2.Prompt) -> list[Media]:
    """The media from which `prompt_of` made the prompt."""
    found = []
    for _, modality, media in named_media(prompt):
        if media.HasField("embeds"):
            grid = media.embeds.grid
            found.append(Media(modality, Grid(grid.t, grid.h, grid.w), media.embeds))
        else:
            t, h, w, content = map(int, media.path.split())
            found.append(Media(modality, Grid(t, h, w), content=content))
    return found


def prompt_of(media: Sequence[Media], own: Mapping[int, prompt_pb2.Pruning] | None = None) -> prompt_pb2.Prompt:
    parts = []
    for index, asked in enumerate(media):
        item = prompt_pb2.Media(embeds=asked.embeds, pruning=(own or {}).get(index))
        if asked.embeds is None:
            item.path = f"{asked.grid.t} {asked.grid.h} {asked.grid.w} {content_of(index, asked)}"
        parts.append(prompt_pb2.Part())
        getattr(parts[-1], asked.modality.value).CopyFrom(item)
    parts.append(prompt_pb2.Part(text="What moves?"))
    return prompt_pb2.Prompt(messages=[prompt_pb2.Message(role=prompt_pb2.ROLE_USER, parts=parts)])


# --- plans and frames -------------------------------------------------------------------------------------------


def content_of(media_index: int, media: Media) -> int:
    return media_index if media.content is None else media.content


def frame_count(media: Media, patches: PatchShape) -> int:
    if media.embeds is not None:
        return 0
    return 1 if media.modality is Modality.IMAGE else media.grid.t * patches.temporal_patch


def frames_of(media_index: int, media: Media, patches: PatchShape) -> NDArray[np.uint8]:
    sides = (media.grid.h * patches.token_px, media.grid.w * patches.token_px)
    shape = (frame_count(media, patches), *sides, 3)
    return np.random.default_rng(content_of(media_index, media)).integers(0, 256, shape, dtype=np.uint8)


def plan_of(media: Sequence[Media], patches: PatchShape, embed_levels: int) -> PromptPlan:
    items, offset = [], 1
    for index, asked in enumerate(media):
        grid, frames = asked.grid, frame_count(asked, patches)
        content = (asked.modality, grid, content_of(index, asked))
        item = MediaPlan(
            modality=asked.modality,
            grid=grid,
            runs=(Run(offset, grid.tokens),),
            frames=FrameShape(frames, (grid.h * patches.token_px, grid.w * patches.token_px))
            if frames
            else FrameShape(),
            seconds_per_grid=Fraction(1) if asked.modality is Modality.VIDEO else None,
            timestamps_s=(),
            content_hash=hashlib.sha256(repr(content).encode()).digest(),
        )
        items.append(item)
        offset += grid.tokens + 1
    positions = np.tile(np.arange(offset, dtype=np.int32), (3, 1))
    return PromptPlan(np.ones(offset, np.int32), positions, tuple(items), embed_levels, FINGERPRINT)


def other_item(plan: PromptPlan, **changes: Any) -> PromptPlan:
    """The plan with changes to its first item."""
    return replace(plan, media=(replace(plan.media[0], **changes), *plan.media[1:]))


def slice_messages(
    media_index: int,
    first_frame: int,
    frames: NDArray[np.uint8],
    dtype: DType = DType.UINT8,
    kept: Sequence[int] | None = None,
) -> list[PreprocessResponse]:
    """kept: the tokens whose squares the frames are."""
    chunks = tensor_chunks(dtype, frames.shape, frames.data if frames.size else memoryview(b""))
    messages = [
        PreprocessResponse(frames=FramesChunk(media_index=media_index, first_frame=first_frame, chunk=chunk))
        for chunk in chunks
    ]
    if kept is not None:
        messages[0].frames.kept.CopyFrom(int32_tensor(np.array(kept, np.int32)))
    content = repr((frames.shape, kept)).encode() + frames.tobytes()
    messages[0].frames.digest = hashlib.sha256(content).digest()
    return messages


def repeating(media_index: int, first_frame: int, repeats_frame: int, **others: Any) -> PreprocessResponse:
    """A slice that repeats another."""
    frames = FramesChunk(media_index=media_index, first_frame=first_frame, repeats_frame=repeats_frame, **others)
    return PreprocessResponse(frames=frames)


def chosen(grid: Grid, number: int, pruning: prompt_pb2.Pruning) -> list[int]:
    """The tokens that the fake chooses of a slice: all of the first, of others a share of the rest; with a threshold
    none of the second."""
    if number == 0:
        return list(range(grid.h * grid.w))
    if pruning.HasField("threshold") and number == 1:
        return []
    rest = max(0, math.floor(grid.tokens * (1 - Fraction(str(pruning.rate)))) - grid.h * grid.w)
    count = rest * number // (grid.t - 1) - rest * (number - 1) // (grid.t - 1)
    return sorted((5 * token + number) % (grid.h * grid.w) for token in range(count))


def squares(frames: NDArray[np.uint8], kept: Sequence[int], side: int) -> NDArray[np.uint8]:
    """The squares of the kept tokens, one below the other: [F, H, W, 3] to [F, k · side, side, 3]."""
    columns = frames.shape[2] // side
    places = [(token // columns * side, token % columns * side) for token in kept]
    empty = np.empty((len(frames), 0, side, 3), np.uint8)
    return np.concatenate([empty, *(frames[:, y : y + side, x : x + side] for y, x in places)], axis=1)


def item_messages(
    media_index: int, media: Media, patches: PatchShape, pruning: prompt_pb2.Pruning | None = None
) -> list[PreprocessResponse]:
    """The frames of an item; with a pruning, of its chosen tokens."""
    frames, step = frames_of(media_index, media, patches), patches.temporal_patch
    messages = []
    for start in range(0, len(frames), step):
        piece, kept = frames[start : start + step], None
        if pruning is not None:
            kept = chosen(media.grid, start // step, pruning)
            piece = squares(piece, kept, patches.token_px)
        messages += slice_messages(media_index, start, piece, kept=kept)
    return messages


# --- the service ------------------------------------------------------------------------------------------------


@dataclass
class FakePreprocessing(preprocessing_pb2_grpc.PreprocessingServiceServicer):
    """Keeps the contract unless a test bends the plan, the frames or the end.

    stall: each selected item waits for `resumed` after its first slice. fail: raised after that, for all items or for
    those whose content is in `failing`. hand_over: makes the shared memory of a slice; by default, slices are sent in
    messages.
    """

    patches: PatchShape
    embed_levels: int
    bend_plan: Callable[[PromptPlan], PromptPlan] = lambda plan: plan
    bend_frames: Callable[[list[PreprocessResponse]], list[PreprocessResponse]] = lambda messages: messages
    fail: Exception | None = None
    failing: frozenset[int] = frozenset()
    fetched_ago_s: float | None = None
    stall: bool = False
    hand_over: Callable[[bytes], SealedMemory] | None = None
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
            yield PreprocessResponse(plan=plan, fetched_ago_s=self.fetched_ago_s)
        with sender_to(first.handover if self.hand_over else b"", "Preprocess") as sender:
            async for request in requests:
                index = request.select.media_index
                self.selected.append(index)
                self.on_select()
                pruning = request.select.pruning if request.select.HasField("pruning") else None
                messages = self.bend_frames(item_messages(index, media[index], self.patches, pruning))
                if self.hand_over:
                    await _hand_over(messages, sender, self.hand_over)
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


async def _hand_over(
    messages: list[PreprocessResponse], sender: Sender | None, memory_of: Callable[[bytes], SealedMemory]
) -> None:
    """Sends the slices in shared memory; the messages announce them."""
    assert sender is not None
    for chunk in (each.frames.chunk for each in messages):
        with memory_of(chunk.data) as memory:
            assert await sender.send(memory, len(chunk.data))
        chunk.data, chunk.shared = b"", True
