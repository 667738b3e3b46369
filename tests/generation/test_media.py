"""The encoder's client against real gRPC servers: delivery, reserved bytes, cancellation and upstream errors."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from common.contract import errors
from framesieve.v1 import tensor_pb2
from framesieve.v1.encoder_pb2 import EncodeResponse
from services.generation.request.encoded_media import MediaItem
from services.generation.rpc.arriving_item import Progress
from services.generation.rpc.timing import StageClock
from tests.generation.generation_peers import (
    Encoder,
    Preprocessing,
    embeds_messages,
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
    ids=str,
)
async def test_embeddings_in_half_precision_are_converted_exactly(
    tmp_path: Path, dtype: torch.dtype, wire_dtype: int
) -> None:
    embeds = torch.linspace(-3, 3, 24).reshape(1, 4, 6).to(dtype)
    plan = prompt_plan(FINGERPRINT, 1, IMAGE, 1)
    chunk = tensor_pb2.TensorChunk(dtype=wire_dtype, shape=[1, 4, 6], data=embeds.view(torch.int16).numpy().tobytes())
    message = EncodeResponse()
    message.embeds.chunk.CopyFrom(chunk)
    async with client_of(tmp_path, Encoder(plan, [message])) as (client, _):
        [item] = await ask(client, plan)
    assert isinstance(item, MediaItem)
    assert torch.equal(item.embeds, embeds.float())


async def test_embeddings_for_cuda_are_pinned_outside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned: list[tuple[torch.Size, bool]] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append((tensor.shape, threading.current_thread() is threading.main_thread()))
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    model = replace(MODEL, device=torch.device("cuda"))
    async with client_of(tmp_path, Encoder(PLAN, items()), model=model) as (client, _):
        await ask(client)
    assert pinned == [(VIDEO_EMBEDS.shape, False), (IMAGE_EMBEDS.shape, False)]


async def test_deepstack_levels_arrive_with_the_embeddings_and_count_as_bytes(tmp_path: Path) -> None:
    sent = np.stack([IMAGE_EMBEDS[0] + level for level in range(3)])
    plan = replace(prompt_plan(FINGERPRINT, 1, IMAGE, 1), embed_levels=2)
    model, size_bytes = replace(MODEL, embed_levels=2), 3 * 4 * 6 * 4
    encoder = Encoder(plan, embeds_messages(0, sent, None, piece_bytes=100))
    async with client_of(tmp_path, encoder, model=model, room_bytes=size_bytes) as (client, room):
        clock = StageClock()
        async with client.open(prompt_message(plan), PRUNING, clock) as session:
            [item] = await receive_all(session, clock)
            assert room.held_bytes == size_bytes
    assert isinstance(item, MediaItem)
    assert torch.equal(item.embeds, torch.from_numpy(sent))


@pytest.mark.parametrize(
    "fault",
    [
        errors.MediaDamaged("9 of 10 frames cannot be decoded"),
        errors.Overloaded("no room", retry_after_s=2),
        errors.Unavailable("preprocessing is draining", "preprocessing"),
    ],
)
async def test_upstream_errors_pass_through(tmp_path: Path, fault: errors.FramesieveError) -> None:
    async with client_of(tmp_path, Encoder(PLAN, fault=fault)) as (client, room):
        with pytest.raises(type(fault), match=str(fault)):
            await ask(client)
        assert room.held_bytes == 0


async def test_the_plan_of_a_prompt_without_media_comes_from_preprocessing(tmp_path: Path) -> None:
    plan = prompt_plan(FINGERPRINT, 5)
    encoder, preprocessing = Encoder(PLAN), Preprocessing(plan)
    async with client_of(tmp_path, encoder, preprocessing) as (client, _):
        clock = StageClock()
        async with client.open(prompt_message(plan), PRUNING, clock) as session:
            assert session.plan.tokens == 5
            assert await receive_all(session, clock) == []
    assert (preprocessing.calls, encoder.metadata) == (1, [])


async def test_media_larger_than_the_buffer_are_refused_before_selection(tmp_path: Path) -> None:
    encoder = Encoder(PLAN, items())
    async with client_of(tmp_path, encoder, room_bytes=SIZE_BYTES - 1) as (client, _):
        with pytest.raises(errors.PromptTooLong, match=rf"{SIZE_BYTES} bytes.*{SIZE_BYTES - 1}; a frame_sampling of"):
            await ask(client)
    assert encoder.selections == [[]]


async def test_nothing_is_selected_before_all_its_bytes_are_reserved(tmp_path: Path) -> None:
    encoder = Encoder(PLAN, items())
    async with client_of(tmp_path, encoder) as (client, room):
        clock = StageClock()
        async with client.open(prompt_message(PLAN), PRUNING, clock) as first:
            await receive_all(first, clock)
            second = asyncio.create_task(ask(client))
            await eventually(lambda: len(encoder.selections) == 2 and room.waiting == 1)
            assert encoder.selections == [[0, 1], []]
        assert len(await second) == 5
        assert encoder.selections == [[0, 1], [0, 1]]
        assert room.held_bytes == 0


async def test_leaving_a_session_cancels_the_encoder_and_releases_the_bytes(tmp_path: Path) -> None:
    encoder = Encoder(PLAN, items(), hold=asyncio.Event())
    async with client_of(tmp_path, encoder) as (client, room):
        receiving = asyncio.create_task(ask(client))
        await eventually(lambda: encoder.selections == [[0, 1]])
        assert room.held_bytes == SIZE_BYTES
        receiving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await receiving
        assert room.held_bytes == 0
        await eventually(lambda: encoder.cancelled == 1)
