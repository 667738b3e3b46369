"""The encoder's client against real servers: what arrives, what is passed on, and that its room is free again."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from common.byte_semaphore import ByteSemaphore
from common.channels import open_channel
from common.contract import errors
from framesieve.v1 import tensor_pb2
from framesieve.v1.encoder_pb2 import EncodeResponse
from services.generation.request.encoded_media import MediaItem
from services.generation.rpc.media import MediaClient, Progress
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


async def test_items_arrive_whole_in_the_models_dtype_and_hold_room_to_the_sessions_end(tmp_path: Path) -> None:
    encoder = Encoder(PLAN, items())
    model = replace(MODEL, dtype=torch.bfloat16)
    async with client_of(tmp_path, encoder, model=model) as (client, room):
        clock = StageClock()
        async with client.open(prompt_message(PLAN), PRUNING, clock) as session:
            assert session.plan.media == PLAN.media
            assert session.kept_counts == (6, 4)
            assert room.held_bytes == 0
            arrivals = await receive_all(session, clock)
            assert room.held_bytes == SIZE_BYTES // 2
        assert room.held_bytes == 0
    assert encoder.selections == [[0, 1]]
    progress = [each for each in arrivals if isinstance(each, Progress)]
    assert progress == [Progress(0, 1, 0), Progress(0, 2, 1), Progress(1, 1, 1)]
    video, image = (each for each in arrivals if isinstance(each, MediaItem))
    assert (video.media_index, video.repaired_frames, image.media_index, image.repaired_frames) == (0, 1, 1, 0)
    assert video.kept is not None
    assert video.kept.tolist() == KEPT
    assert image.kept is None
    for item, sent in ((video, VIDEO_EMBEDS), (image, IMAGE_EMBEDS)):
        assert item.embeds.dtype == torch.bfloat16
        assert torch.equal(item.embeds, torch.from_numpy(sent).bfloat16())


@pytest.mark.parametrize(
    ("dtype", "on_the_wire"),
    [(torch.bfloat16, tensor_pb2.DTYPE_BFLOAT16), (torch.float16, tensor_pb2.DTYPE_FLOAT16)],
    ids=str,
)
async def test_shorter_embeddings_arrive_as_they_are(tmp_path: Path, dtype: torch.dtype, on_the_wire: int) -> None:
    embeds = torch.linspace(-3, 3, 24).reshape(1, 4, 6).to(dtype)
    plan = prompt_plan(FINGERPRINT, 1, IMAGE, 1)
    chunk = tensor_pb2.TensorChunk(dtype=on_the_wire, shape=[1, 4, 6], data=embeds.view(torch.int16).numpy().tobytes())
    message = EncodeResponse()
    message.embeds.chunk.CopyFrom(chunk)
    async with client_of(tmp_path, Encoder(plan, [message])) as (client, _):
        [item] = await ask(client, plan)
    assert isinstance(item, MediaItem)
    assert torch.equal(item.embeds, embeds.float())


async def test_embeddings_for_a_cuda_device_are_pinned_beside_the_loop(
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


async def test_levels_arrive_beside_the_embeddings_and_take_room_of_their_own(tmp_path: Path) -> None:
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
async def test_what_upstream_refuses_passes_through(tmp_path: Path, fault: errors.FramesieveError) -> None:
    async with client_of(tmp_path, Encoder(PLAN, fault=fault)) as (client, room):
        with pytest.raises(type(fault), match=str(fault)):
            await ask(client)
        assert room.held_bytes == 0


async def test_an_encoder_that_is_gone_is_named(tmp_path: Path) -> None:
    async with open_channel(f"unix:{tmp_path}/nobody") as channel:
        client = MediaClient(channel, channel, MODEL, ByteSemaphore(SIZE_BYTES))
        with pytest.raises(errors.Unavailable, match="encoder") as info:
            await ask(client)
    assert info.value.stage == "encoder"


async def test_a_prompt_without_media_asks_preprocessing_alone(tmp_path: Path) -> None:
    plan = prompt_plan(FINGERPRINT, 5)
    encoder, preprocessing = Encoder(PLAN), Preprocessing(plan)
    async with client_of(tmp_path, encoder, preprocessing) as (client, _):
        clock = StageClock()
        async with client.open(prompt_message(plan), PRUNING, clock) as session:
            assert session.plan.tokens == 5
            assert await receive_all(session, clock) == []
    assert (preprocessing.calls, encoder.metadata) == (1, [])


async def test_media_that_can_never_be_held_together_are_refused_before_any_is_selected(tmp_path: Path) -> None:
    encoder = Encoder(PLAN, items())
    async with client_of(tmp_path, encoder, room_bytes=SIZE_BYTES - 1) as (client, _):
        with pytest.raises(errors.PromptTooLong, match=rf"{SIZE_BYTES} bytes.*{SIZE_BYTES - 1}; a frame_sampling of"):
            await ask(client)
    assert encoder.selections == [[]]


async def test_nothing_is_selected_before_there_is_room_for_all_of_it(tmp_path: Path) -> None:
    encoder = Encoder(PLAN, items())
    async with client_of(tmp_path, encoder) as (client, room):
        clock = StageClock()
        async with client.open(prompt_message(PLAN), PRUNING, clock) as first:
            await receive_all(first, clock)
            second = asyncio.create_task(ask(client))
            await eventually(lambda: len(encoder.selections) == 2)
            await asyncio.sleep(0.05)
            assert encoder.selections == [[0, 1], []]
        assert len(await second) == 5
        assert encoder.selections == [[0, 1], [0, 1]]
        assert room.held_bytes == 0


async def test_many_sessions_of_two_items_share_room_for_one_session(tmp_path: Path) -> None:
    async with client_of(tmp_path, Encoder(PLAN, items())) as (client, room):
        async with asyncio.timeout(30):
            answers = await asyncio.gather(*(ask(client) for _ in range(12)))
        assert [sum(isinstance(each, MediaItem) for each in answer) for answer in answers] == [2] * 12
        assert room.held_bytes == 0


async def test_leaving_a_session_cancels_the_encoder_and_frees_the_room(tmp_path: Path) -> None:
    encoder = Encoder(PLAN, items(), hold=asyncio.Event())
    async with client_of(tmp_path, encoder) as (client, room):
        waiting = asyncio.create_task(ask(client))
        await eventually(lambda: encoder.selections == [[0, 1]])
        assert room.held_bytes == SIZE_BYTES
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert room.held_bytes == 0
        await eventually(lambda: encoder.cancelled == 1)


async def test_a_session_that_waits_for_room_can_be_left(tmp_path: Path) -> None:
    encoder = Encoder(PLAN, items())
    async with client_of(tmp_path, encoder) as (client, room):
        async with room.reserved(1):
            waiting = asyncio.create_task(ask(client))
            await eventually(lambda: encoder.selections == [[]])
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        assert room.held_bytes == 0
        assert len(await ask(client)) == 5
