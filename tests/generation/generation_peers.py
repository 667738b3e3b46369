"""Fake peers of generation: an encoder and a preprocessing service with scripted responses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from gridsieve.common.contract.plan import FrameShape, Grid, MediaPlan, Modality, PromptPlan, Run
from gridsieve.common.contract.wire import grid_message, plan_messages
from gridsieve.common.handover import Sender, sender_to
from gridsieve.common.sealed_memory import SealedMemory
from gridsieve.v1 import encoder_pb2_grpc, preprocessing_pb2_grpc, prompt_pb2, tensor_pb2
from gridsieve.v1.encoder_pb2 import EmbedsChunk, EncodeRequest, EncodeResponse, MediaProgress
from gridsieve.v1.preprocessing_pb2 import PreprocessRequest, PreprocessResponse
from tests.common.loopback import eventually as eventually
from tests.common.loopback import serving as serving

Context = grpc.aio.ServicerContext[Any, Any]


def media_plan(modality: Modality, offset: int, grid: Grid) -> MediaPlan:
    """Two frames per slice and 28 × 28 pixels per token, at two frames per second."""
    video = modality is Modality.VIDEO
    return MediaPlan(
        modality=modality,
        grid=grid,
        runs=(Run(offset, grid.tokens),),
        frames=FrameShape(2 * grid.t if video else 1, (28 * grid.h, 28 * grid.w)),
        seconds_per_grid=Fraction(1) if video else None,
        timestamps_s=tuple(0.5 * i for i in range(2 * grid.t)) if video else (),
        content_hash=bytes(32),
    )


def prompt_plan(fingerprint: bytes, *parts: int | tuple[Modality, Grid]) -> PromptPlan:
    """A plan of media and texts, the latter given by their numbers of tokens; ids and positions count up."""
    media, tokens = [], 0
    for part in parts:
        if isinstance(part, int):
            tokens += part
        else:
            media.append(media_plan(part[0], tokens, part[1]))
            tokens += part[1].tokens
    ids = np.arange(tokens, dtype=np.int32)
    return PromptPlan(ids % 100, np.tile(ids, (3, 1)), tuple(media), 0, fingerprint)


def prompt_message(plan: PromptPlan) -> prompt_pb2.Prompt:
    """A prompt with the plan's media, with embeddings if the plan has no frames for an item."""
    parts = [prompt_pb2.Part(text="What moves?")]
    for item in plan.media:
        media = prompt_pb2.Media(path="clip.mp4")
        if item.brings_embeds:
            media = prompt_pb2.Media(embeds=prompt_pb2.MediaEmbeds(grid=grid_message(item.grid)))
        parts.append(prompt_pb2.Part())
        getattr(parts[-1], item.modality.value).CopyFrom(media)
    return prompt_pb2.Prompt(messages=[prompt_pb2.Message(role=prompt_pb2.ROLE_USER, parts=parts)])


def embeds_messages(
    index: int, embeds: NDArray[np.float32], kept: Sequence[int] | None, piece_bytes: int = 1000, repaired: int = 0
) -> list[EncodeResponse]:
    """One item's float32 embeddings [1 + levels, K, D] in pieces."""
    data = embeds.astype("<f4").tobytes()
    messages = []
    for offset in range(0, len(data), piece_bytes):
        chunk = tensor_pb2.TensorChunk(
            dtype=tensor_pb2.DTYPE_FLOAT32,
            shape=embeds.shape,
            offset_bytes=offset,
            data=data[offset : offset + piece_bytes],
        )
        messages.append(EncodeResponse(embeds=EmbedsChunk(media_index=index, chunk=chunk)))
    if kept is not None:
        array = np.array(kept, "<i4")
        messages[0].embeds.kept.CopyFrom(
            tensor_pb2.Tensor(dtype=tensor_pb2.DTYPE_INT32, shape=array.shape, data=array.tobytes())
        )
    messages[0].embeds.repaired_frames = repaired
    return messages


def part_messages(
    index: int, embeds: NDArray[np.float32], kept: Sequence[int] | None, slices: int | None, piece_bytes: int = 1000
) -> list[EncodeResponse]:
    """A part of an item, as `embeds_messages` makes it. slices: that it has; None: it is the last."""
    messages = embeds_messages(index, embeds, kept, piece_bytes)
    if slices is not None:
        messages[0].embeds.slices = slices
    return messages


def progress_message(index: int, decoded: int, encoded: int) -> EncodeResponse:
    return EncodeResponse(progress=MediaProgress(media_index=index, decoded_slices=decoded, encoded_slices=encoded))


@dataclass
class Encoder(encoder_pb2_grpc.EncoderServiceServicer):
    """Sends the plan, reads all selections, then sends the items.

    hold: if given, items are sent after it is set. fault: raised instead of sending items. hand_over: makes the shared
    memory of embeddings; by default, they are sent in messages.
    """

    plan: PromptPlan
    items: Sequence[EncodeResponse] = ()
    fetched_ago_s: float | None = None
    hold: asyncio.Event | None = None
    fault: Exception | None = None
    hand_over: Callable[[bytes], SealedMemory] | None = None
    selections: list[list[int]] = field(default_factory=list)
    metadata: list[dict[str, Any]] = field(default_factory=list)
    cancelled: int = 0

    async def Encode(self, requests: AsyncIterator[EncodeRequest], context: Context) -> AsyncIterator[EncodeResponse]:
        self.metadata.append(dict(context.invocation_metadata() or ()))
        selected: list[int] = []
        try:
            first = await anext(requests)
            assert first.HasField("prompt")
            for message in plan_messages(self.plan):
                yield EncodeResponse(plan=message, fetched_ago_s=self.fetched_ago_s)
            self.selections.append(selected)
            async for request in requests:
                selected.append(request.select.media_index)  # noqa: PERF401  (tests watch the list grow)
            if self.hold:
                await self.hold.wait()
            if self.fault:
                raise self.fault
            with sender_to(first.handover if self.hand_over else b"", "Encode") as sender:
                for item in self.items:
                    yield await _handed_over(item, sender, self.hand_over) if sender and self.hand_over else item
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


async def _handed_over(
    item: EncodeResponse, sender: Sender, memory_of: Callable[[bytes], SealedMemory]
) -> EncodeResponse:
    """Hands over the embeddings of a message, if it has any; returns the message that announces them."""
    if not item.HasField("embeds"):
        return item
    announcement = EncodeResponse()
    announcement.CopyFrom(item)
    chunk = announcement.embeds.chunk
    with memory_of(chunk.data) as memory:
        assert await sender.send(memory, len(chunk.data))
    chunk.data, chunk.shared = b"", True
    return announcement


@dataclass
class Preprocessing(preprocessing_pb2_grpc.PreprocessingServiceServicer):
    """Sends the plan."""

    plan: PromptPlan
    fetched_ago_s: float | None = None
    calls: int = 0

    async def Preprocess(
        self, requests: AsyncIterator[PreprocessRequest], context: Context
    ) -> AsyncIterator[PreprocessResponse]:
        self.calls += 1
        assert (await anext(requests)).HasField("prompt")
        for message in plan_messages(self.plan):
            yield PreprocessResponse(plan=message, fetched_ago_s=self.fetched_ago_s)
