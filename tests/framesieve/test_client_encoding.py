"""`encode` against a hand-written encoder on a unix socket: two items of a family with deepstack, in pieces."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch

from common.contract import errors
from common.contract.plan import Grid, MediaPlan, Modality, PromptPlan, Run
from common.contract.retention import RANDOM, VIDCOM2
from common.contract.tensors import DType, TensorBuffer
from common.contract.wire import int32_tensor, plan_messages, tensor_chunks
from common.serving.interceptors import RequestInterceptor
from framesieve import Encoded, Image, Message, Pruning, Text, Video, encode
from framesieve.client.messages import prompt_message
from framesieve.v1 import encoder_pb2, encoder_pb2_grpc, prompt_pb2

MIB = 2**20
LEVELS, WIDTH = 3, 5
PHOTO = MediaPlan(
    modality=Modality.IMAGE,
    grid=Grid(1, 2, 2),
    runs=(Run(1, 4),),
    frames=1,
    frame_height_px=64,
    frame_width_px=64,
    seconds_per_grid=None,
    timestamps_s=(),
    content_hash=bytes(32),
)
CLIP = MediaPlan(
    modality=Modality.VIDEO,
    grid=Grid(3, 2, 3),
    runs=(Run(8, 6), Run(18, 6), Run(28, 6)),
    frames=6,
    frame_height_px=64,
    frame_width_px=96,
    seconds_per_grid=Fraction(2, 3),
    timestamps_s=tuple(index / 3 for index in range(6)),
    content_hash=bytes(32),
)
PLAN = PromptPlan(
    input_ids=np.zeros(40, dtype=np.int32),
    positions=np.zeros((3, 40), dtype=np.int32),
    media=(PHOTO, CLIP),
    embed_levels=LEVELS,
    fingerprint=b"f" * 32,
)
MEDIA = (Image(data=b"photo"), Video(data=b"film"))
TORCH_DTYPES = {DType.BFLOAT16: torch.bfloat16, DType.FLOAT16: torch.float16, DType.FLOAT32: torch.float32}
Chunks = list[encoder_pb2.EmbedsChunk]


def values(tokens: int, seed: int, dtype: DType = DType.FLOAT32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1 + LEVELS, tokens, WIDTH, generator=generator).to(TORCH_DTYPES[dtype])


def chunks(
    index: int, embeds: torch.Tensor, kept: list[int] | None, dtype: DType = DType.FLOAT32, repaired_frames: int = 0
) -> Chunks:
    """The item's pieces: cut in two, as a larger item's would be."""
    (whole,) = tensor_chunks(dtype, embeds.shape, as_bytes(embeds))
    cut = len(whole.data) // 2
    first, second = encoder_pb2.EmbedsChunk(media_index=index), encoder_pb2.EmbedsChunk(media_index=index)
    for piece, start, end in ((first, 0, cut), (second, cut, len(whole.data))):
        piece.chunk.CopyFrom(whole)
        piece.chunk.offset_bytes, piece.chunk.data = start, whole.data[start:end]
    if kept is not None:
        first.kept.CopyFrom(int32_tensor(np.array(kept, dtype=np.int32)))
    first.repaired_frames = repaired_frames
    return [first, second]


def as_bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.contiguous().view(torch.uint8).numpy().tobytes())


class FakeEncoder(encoder_pb2_grpc.EncoderServiceServicer):
    """Answers with its plan and then with these pieces, and remembers what it was asked."""

    def __init__(self, pieces: Chunks, plan: PromptPlan) -> None:
        self.pieces = pieces
        self.plan = plan
        self.asked = encoder_pb2.EncodePrompt()

    async def Encode(self, requests: Any, context: Any) -> AsyncIterator[encoder_pb2.EncodeResponse]:
        self.asked = (await anext(requests)).prompt
        for plan in plan_messages(self.plan):
            yield encoder_pb2.EncodeResponse(plan=plan)
        assert (await anext(requests)).select.all
        yield encoder_pb2.EncodeResponse(progress=encoder_pb2.MediaProgress(media_index=1, decoded_slices=1))
        for piece in self.pieces:
            yield encoder_pb2.EncodeResponse(embeds=piece)


@asynccontextmanager
async def served(tmp_path: Path, pieces: Chunks, plan: PromptPlan = PLAN) -> AsyncIterator[tuple[str, FakeEncoder]]:
    fake, address = FakeEncoder(pieces, plan), f"unix:{tmp_path}/encoder.sock"
    server = grpc.aio.server(interceptors=[RequestInterceptor()])
    encoder_pb2_grpc.add_EncoderServiceServicer_to_server(fake, server)
    server.add_insecure_port(address)
    await server.start()
    try:
        yield address, fake
    finally:
        await server.stop(0)


def ask(tmp_path: Path, pieces: Chunks, pruning: Pruning | None = None, plan: PromptPlan = PLAN) -> tuple[Encoded, ...]:
    async def run() -> tuple[Encoded, ...]:
        async with served(tmp_path, pieces, plan) as (address, _):
            return await encode(address, MEDIA, *([pruning] if pruning else []))

    return asyncio.run(run())


def whole(dtype: DType = DType.FLOAT32) -> tuple[torch.Tensor, torch.Tensor, Chunks]:
    photo, clip = values(4, 0, dtype), values(18, 1, dtype)
    return photo, clip, chunks(0, photo, None, dtype) + chunks(1, clip, None, dtype, repaired_frames=2)


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_every_item_comes_whole_with_its_levels_unless_a_pruning_is_given(tmp_path: Path, dtype: DType) -> None:
    photo, clip, pieces = whole(dtype)
    first, second = ask(tmp_path, pieces)
    assert (first.plan, second.plan) == (PHOTO, CLIP)
    assert first.fingerprint == PLAN.fingerprint
    assert (first.kept.tolist(), second.kept.tolist()) == (list(range(4)), list(range(18)))
    assert (first.repaired_frames, second.repaired_frames) == (0, 2)
    for item, sent in ((first, photo), (second, clip)):
        assert item.values.dtype == (np.float16 if dtype is DType.FLOAT16 else np.float32)
        np.testing.assert_array_equal(item.values, sent.float().numpy())


async def test_a_prompt_larger_than_any_service_takes_is_refused_by_its_size_and_unsent(tmp_path: Path) -> None:
    words = "x" * (20 * MIB)
    request = encoder_pb2.EncodeRequest(prompt={"pruning": {"method": Pruning().method}})
    request.prompt.prompt.messages.add(role=prompt_pb2.ROLE_USER).parts.add(text=words)
    told = rf"^the request has {len(request.SerializeToString())} bytes, at most {20 * MIB} are allowed$"
    async with served(tmp_path, []) as (address, fake):
        with pytest.raises(errors.InvalidRequest, match=told):
            await encode(address, Text(words))
    assert not fake.asked.ListFields()


def test_pieces_of_two_items_may_come_in_any_turn(tmp_path: Path) -> None:
    photo, clip, (photo_a, photo_b, clip_a, clip_b) = whole()
    first, second = ask(tmp_path, [clip_a, photo_a, clip_b, photo_b])
    np.testing.assert_array_equal(first.values, photo.numpy())
    np.testing.assert_array_equal(second.values, clip.numpy())


@pytest.mark.parametrize(
    ("pruning", "kept"),
    [
        (Pruning(0.5), [0, 1, 2, 3, 4, 5, 8, 11, 17]),
        (Pruning(0.9), [0, 1, 2, 3, 4, 5]),
        (Pruning(0.9, VIDCOM2), [2, 7, 16]),
        (Pruning(0.5, RANDOM, seed=3), [0, 2, 4, 6, 8, 10, 12, 14, 16]),
    ],
    ids=["evs", "evs at its floor", "vidcom2 at its floor", "random"],
)
async def test_a_video_is_pruned_as_asked_and_an_image_never(tmp_path: Path, pruning: Pruning, kept: list[int]) -> None:
    pieces = chunks(0, values(4, 0), None) + chunks(1, values(len(kept), 1), kept)
    async with served(tmp_path, pieces) as (address, fake):
        photo, clip = await encode(address, MEDIA, pruning)
    asked = fake.asked.pruning
    assert (asked.rate, asked.method, asked.HasField("seed")) == (
        pruning.rate,
        pruning.method,
        pruning.method == RANDOM,
    )
    assert photo.kept.size == 4
    assert clip.kept.tolist() == kept
    assert clip.values.shape == (1 + LEVELS, len(kept), WIDTH)


async def test_a_videos_own_pruning_is_the_one_that_counts(tmp_path: Path) -> None:
    pieces = chunks(0, values(4, 0), None) + chunks(1, values(3, 1), [0, 6, 12])
    own = (MEDIA[0], Video(data=b"film", pruning=Pruning(0.9, VIDCOM2)))
    async with served(tmp_path, pieces) as (address, _):
        _, clip = await encode(address, own, Pruning(0.5))
    assert clip.kept.tolist() == [0, 6, 12]


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_what_was_encoded_whole_can_stand_in_a_prompt_in_place_of_its_pixels(tmp_path: Path, dtype: DType) -> None:
    photo, clip, pieces = whole(dtype)
    first, second = ask(tmp_path, pieces)
    again = (Image(embeds=first.as_embeds()), Video(embeds=second.as_embeds()))
    image, video = prompt_message([Message("user", again)]).messages[0].parts
    for sent, tensor, grid in ((image.image, photo, PHOTO.grid), (video.video, clip, CLIP.grid)):
        assert sent.embeds.tensor.data == bytes(as_bytes(tensor))
        assert list(sent.embeds.tensor.shape) == list(tensor.shape)
        assert (sent.embeds.grid.t, sent.embeds.grid.h, sent.embeds.grid.w) == (grid.t, grid.h, grid.w)
    assert not image.image.embeds.HasField("seconds_per_grid")
    assert not image.image.embeds.timestamps_s


def encoded(plan: MediaPlan, kept: int | None = None) -> Encoded:
    tokens = kept or plan.grid.tokens
    tensor = TensorBuffer(DType.FLOAT32, (1, tokens, WIDTH))
    return Encoded(plan, PLAN.fingerprint, np.arange(tokens, dtype=np.int32), tensor, repaired_frames=0)


def test_slices_behind_their_own_times_keep_them_however_uneven_their_frames_were() -> None:
    uneven = dataclasses.replace(CLIP, timestamps_s=(0.0, 0.5, 1.0, 1.75, 2.5, 3.0))
    embeds = encoded(uneven).as_embeds()
    assert embeds.timestamps_s == (0.25, 1.375, 2.75)
    assert embeds.seconds_per_slice is None


def test_slices_in_one_run_keep_the_step_that_they_were_laid_out_with() -> None:
    embeds = encoded(dataclasses.replace(CLIP, runs=(Run(8, 18),))).as_embeds()
    assert (embeds.seconds_per_slice, embeds.timestamps_s) == (Fraction(2, 3), ())


def test_pruned_embeddings_cannot_stand_in_a_prompt() -> None:
    with pytest.raises(errors.InvalidRequest, match="embeddings of all 18 tokens, got 6"):
        encoded(CLIP, kept=6).as_embeds()


def test_embeddings_that_a_prompt_brought_are_not_taken_for_frames() -> None:
    brought = dataclasses.replace(CLIP, frames=0, frame_height_px=0, frame_width_px=0, timestamps_s=())
    with pytest.raises(errors.InvalidRequest, match="pass the same Embeds again"):
        encoded(brought).as_embeds()


def without_the_photo() -> Chunks:
    return chunks(1, values(18, 1), None)


def of_an_item_too_many() -> Chunks:
    return whole()[2] + chunks(2, values(4, 0), None)


def cut_short() -> Chunks:
    return whole()[2][:-1]


def of_fewer_levels() -> Chunks:
    return chunks(0, values(4, 0)[1:], None) + chunks(1, values(18, 1), None)


def of_two_axes() -> Chunks:
    return chunks(0, values(4, 0)[:, :, 0], None) + chunks(1, values(18, 1), None)


def of_integers() -> Chunks:
    return chunks(0, values(4, 0), None, DType.INT32) + chunks(1, values(18, 1), None)


def of_too_few_tokens() -> Chunks:
    return chunks(0, values(4, 0), None) + chunks(1, values(17, 1), list(range(17)))


def of_one_token_twice() -> Chunks:
    return chunks(0, values(4, 0), None) + chunks(1, values(18, 1), [0, *range(17)])


def of_a_token_after_the_grid() -> Chunks:
    return chunks(0, values(4, 0), None) + chunks(1, values(18, 1), list(range(1, 19)))


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        (without_the_photo, r"items \[1\], expected 2 items"),
        (of_an_item_too_many, r"items \[0, 1, 2\], expected 2 items"),
        (cut_short, "after 720 of 1440 bytes of item 1"),
        (of_fewer_levels, r"\[4, 4, 5\], got float32 \[3, 4, 5\]"),
        (of_two_axes, r"got float32 \[4, 4\]"),
        (of_integers, "expected bfloat16 or float16 or float32"),
        (of_too_few_tokens, "kept 17 tokens, expected 18 strictly increasing"),
        (of_one_token_twice, "strictly increasing"),
        (of_a_token_after_the_grid, "below 18"),
    ],
    ids=lambda value: getattr(value, "__name__", "")[:40],
)
def test_an_encoder_that_breaks_the_contract_is_told_of(
    tmp_path: Path, pieces: Callable[[], Chunks], message: str
) -> None:
    with pytest.raises(errors.PeerContract, match=message):
        ask(tmp_path, pieces())


def test_a_plan_of_other_media_is_refused(tmp_path: Path) -> None:
    alone = PromptPlan(PLAN.input_ids, PLAN.positions, (CLIP,), LEVELS, PLAN.fingerprint)
    with pytest.raises(errors.PeerContract, match="does not have 2 images and videos"):
        ask(tmp_path, whole()[2], plan=alone)
