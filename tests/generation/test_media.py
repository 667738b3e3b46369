"""The encoder's client against real gRPC servers: delivery, reserved bytes, cancellation and upstream errors."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from framesieve.v1 import tensor_pb2
from framesieve.v1.encoder_pb2 import EncodeResponse
from services.generation.request.encoded_media import MediaItem
from services.generation.rpc.media import Progress
from services.generation.rpc.timing import StageClock
from tests.generation.generation_peers import (
    Encoder,
    eventually,
    prompt_message,
    prompt_plan,
)
from tests.generation.media_client import (
    FINGERPRINT,
    IMAGE,
    IMAGE_EMBEDS,
    KEPT,
    MODEL,
    PLAN,
    PRUNING,
    SIZE_BYTES,
    VIDEO_EMBEDS,
    ask,
    client_of,
    items,
    receive_all,
)


async def test_items_arrive_in_the_models_dtype_and_the_session_holds_their_bytes(tmp_path: Path) -> None:
    encoder = Encoder(PLAN, items())
    model = replace(MODEL, dtype=torch.bfloat16)
    async with client_of(tmp_path, encoder, model=model) as (client, room):
        clock = StageClock()
        async with client.open(prompt_message(PLAN), PRUNING, clock) as session:
            assert (session.plan.media, session.kept_counts, room.held_bytes) == (PLAN.media, (6, 4), 0)
            received = await receive_all(session, clock)
            assert room.held_bytes == SIZE_BYTES // 2
        assert room.held_bytes == 0
    assert encoder.selections == [[0, 1]]
    progress = [each for each in received if isinstance(each, Progress)]
    assert progress == [Progress(0, 1, 0), Progress(0, 2, 1), Progress(1, 1, 1)]
    video, image = (each for each in received if isinstance(each, MediaItem))
    assert (video.media_index, video.repaired_frames, image.media_index, image.repaired_frames) == (0, 1, 1, 0)
    assert video.kept is not None
    assert (video.kept.tolist(), image.kept) == (KEPT, None)
    for item, sent in ((video, VIDEO_EMBEDS), (image, IMAGE_EMBEDS)):
        assert item.embeds.dtype == torch.bfloat16
        assert torch.equal(item.embeds, torch.from_numpy(sent).bfloat16())


@pytest.mark.parametrize(
    ("dtype", "wire_dtype"),
    [(torch.bfloat16, tensor_pb2.DTYPE_BFLOAT16), (torch.float16, tensor_pb2.DTYPE_FLOAT16)],
)
async def test_half_precision_is_converted_exactly_and_levels_count_as_bytes(
    tmp_path: Path, dtype: torch.dtype, wire_dtype: Any
) -> None:
    embeds = torch.linspace(-3, 3, 72).reshape(3, 4, 6).to(dtype)
    plan = replace(prompt_plan(FINGERPRINT, 1, IMAGE, 1), embed_levels=2)
    message = EncodeResponse()
    data = embeds.view(torch.int16).numpy().tobytes()
    message.embeds.chunk.CopyFrom(tensor_pb2.TensorChunk(dtype=wire_dtype, shape=embeds.shape, data=data))
    model, size_bytes = replace(MODEL, embed_levels=2), 3 * 4 * 6 * 4
    async with client_of(tmp_path, Encoder(plan, [message]), model=model, room_bytes=size_bytes) as (client, room):
        clock = StageClock()
        async with client.open(prompt_message(plan), PRUNING, clock) as session:
            [item] = await receive_all(session, clock)
            assert room.held_bytes == size_bytes
    assert isinstance(item, MediaItem)
    assert torch.equal(item.embeds, embeds.float())


async def test_nothing_is_selected_before_all_its_bytes_are_reserved(tmp_path: Path) -> None:
    encoder = Encoder(PLAN, items())
    async with client_of(tmp_path, encoder) as (client, room):
        async with room.reserved(1):
            asking = asyncio.create_task(ask(client))
            await eventually(lambda: encoder.selections == [[]] and room.waiting == 1)
        assert len(await asking) == 5
        assert encoder.selections == [[0, 1]]
        assert room.held_bytes == 0
