"""`encode` against a hand-written encoder: two items of a family with deepstack, in chunks."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gridsieve import Encoded, Image, Message, Pruning, Video, encode
from gridsieve.client.messages import generate_request
from gridsieve.common.contract import errors
from gridsieve.common.contract.plan import FrameShape, Grid, MediaPlan, Modality, PromptPlan, Run
from gridsieve.common.contract.retention import RANDOM, VIDCOM2, ItemPruning
from gridsieve.common.contract.tensors import DType, TensorBuffer
from gridsieve.common.contract.wire import int32_tensor, plan_messages, tensor_chunks
from gridsieve.v1 import encoder_pb2, encoder_pb2_grpc
from tests.common.loopback import serving

MIB = 2**20
LEVELS, WIDTH = 3, 5
PHOTO = MediaPlan(Modality.IMAGE, Grid(1, 2, 2), (Run(1, 4),), FrameShape(1, (64, 64)), None, (), bytes(32))
CLIP = MediaPlan(
    modality=Modality.VIDEO,
    grid=Grid(3, 2, 3),
    runs=(Run(8, 6), Run(18, 6), Run(28, 6)),
    frames=FrameShape(6, (64, 96)),
    seconds_per_grid=Fraction(2, 3),
    timestamps_s=tuple(index / 3 for index in range(6)),
    content_hash=bytes(32),
)
IDS, POSITIONS = np.zeros(40, dtype=np.int32), np.zeros((3, 40), dtype=np.int32)
PLAN = PromptPlan(IDS, POSITIONS, (PHOTO, CLIP), LEVELS, fingerprint=b"f" * 32)
MEDIA = (Image(data=b"photo"), Video(data=b"film"))
TORCH_DTYPES = {DType.BFLOAT16: torch.bfloat16, DType.FLOAT16: torch.float16, DType.FLOAT32: torch.float32}
Chunks = list[encoder_pb2.EmbedsChunk]


def values(tokens: int, seed: int, dtype: DType = DType.FLOAT32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1 + LEVELS, tokens, WIDTH, generator=generator).to(TORCH_DTYPES[dtype])


def chunks(
    index: int, embeds: torch.Tensor, kept: list[int] | None, dtype: DType = DType.FLOAT32, repaired_frames: int = 0
) -> Chunks:
    """The item cut into two chunks, as a larger item would be."""
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
    """Sends its plan and then these chunks, and records the request."""

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
    async with serving(address, fake):
        yield address, fake


async def ask(tmp_path: Path, pieces: Chunks, plan: PromptPlan = PLAN, rate: float = 0.0) -> tuple[Encoded, ...]:
    async with served(tmp_path, pieces, plan) as (address, _):
        return await encode(address, MEDIA, Pruning(rate))


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
async def test_items_arrive_whole_and_can_replace_their_pixels_in_a_prompt(tmp_path: Path, dtype: DType) -> None:
    photo, clip = values(4, 0, dtype), values(18, 1, dtype)
    (photo_a, photo_b), (clip_a, clip_b) = chunks(0, photo, None, dtype), chunks(1, clip, None, dtype, 2)
    first, second = await ask(tmp_path, [clip_a, photo_a, clip_b, photo_b])  # chunks of items may be interleaved
    assert (first.plan, second.plan) == (PHOTO, CLIP)
    assert first.fingerprint == PLAN.fingerprint
    assert (first.kept.tolist(), second.kept.tolist()) == (list(range(4)), list(range(18)))
    assert (first.repaired_frames, second.repaired_frames) == (0, 2)
    again = [Message("user", (Image(embeds=first.as_embeds()), Video(embeds=second.as_embeds())))]
    image, video = generate_request(again, {}).prompt.messages[0].parts
    for item, media, tensor in ((first, image.image, photo), (second, video.video, clip)):
        assert item.values.dtype == (np.float16 if dtype is DType.FLOAT16 else np.float32)
        np.testing.assert_array_equal(item.values, tensor.float().numpy())
        assert media.embeds.tensor.data == bytes(as_bytes(tensor))
        assert list(media.embeds.tensor.shape) == list(tensor.shape)
        grid = item.plan.grid
        assert (media.embeds.grid.t, media.embeds.grid.h, media.embeds.grid.w) == (grid.t, grid.h, grid.w)
    assert not image.image.embeds.HasField("seconds_per_grid")
    assert not image.image.embeds.timestamps_s


@pytest.mark.parametrize(
    ("pruning", "own", "kept"),
    [
        (Pruning(0.5, RANDOM, seed=3), None, [0, 2, 4, 6, 8, 10, 12, 14, 16]),
        (Pruning(0.5), Pruning(0.9, VIDCOM2), [2, 7, 16]),
    ],
    ids=["random", "the video's own"],
)
async def test_a_video_is_pruned_as_requested_and_an_image_never(
    tmp_path: Path, pruning: Pruning, own: Pruning | None, kept: list[int]
) -> None:
    pieces = chunks(0, values(4, 0), None) + chunks(1, values(len(kept), 1), kept)
    async with served(tmp_path, pieces) as (address, fake):
        photo, clip = await encode(address, (MEDIA[0], Video(data=b"film", pruning=own)), pruning)
    asked = fake.asked.pruning
    seeded = asked.HasField("seed")
    assert (asked.rate, asked.method, seeded) == (pruning.rate, pruning.method or "", pruning.method == RANDOM)
    assert photo.kept.size == 4
    assert clip.kept.tolist() == kept
    assert clip.values.shape == (1 + LEVELS, len(kept), WIDTH)


def encoded(plan: MediaPlan, kept: int = CLIP.grid.tokens) -> Encoded:
    tensor = TensorBuffer(DType.FLOAT32, (1, kept, WIDTH))
    return Encoded(plan, PLAN.fingerprint, np.arange(kept, dtype=np.int32), tensor, 0, ItemPruning())


def test_embeddings_keep_the_time_base_of_their_frames() -> None:
    uneven = dataclasses.replace(CLIP, timestamps_s=(0.0, 0.5, 1.0, 1.75, 2.5, 3.0))
    embeds = encoded(uneven).as_embeds()  # slices with a timestamp each: the midpoint of their frames
    assert (embeds.seconds_per_slice, embeds.timestamps_s) == (None, (0.25, 1.375, 2.75))
    embeds = encoded(dataclasses.replace(CLIP, runs=(Run(8, 18),))).as_embeds()
    assert (embeds.seconds_per_slice, embeds.timestamps_s) == (Fraction(2, 3), ())


def test_pruned_and_resent_embeddings_cannot_be_used_in_a_prompt() -> None:
    resent = dataclasses.replace(CLIP, frames=FrameShape(), timestamps_s=())
    with pytest.raises(errors.InvalidRequest, match="embeddings of all 18 tokens, got 6"):
        encoded(CLIP, kept=6).as_embeds()
    with pytest.raises(errors.InvalidRequest, match="pass the same Embeds again"):
        encoded(resent).as_embeds()


def test_an_image_is_sent_again_as_embeddings_only_where_each_of_its_frames_has_a_row_of_its_own() -> None:
    frames = FrameShape(7, (64, 64), tile_columns=3)
    sliced = dataclasses.replace(PHOTO, grid=Grid(1, 7, 2), runs=(Run(1, 14),), frames=frames)
    embeds = encoded(sliced, kept=14).as_embeds()
    assert (embeds.grid, embeds.tile_columns) == (Grid(1, 7, 2), 3)
    (part,) = generate_request([Message("user", (Image(embeds=embeds),))], {}).prompt.messages[0].parts
    assert part.image.embeds.tile_columns == 3
    joined = dataclasses.replace(sliced, grid=Grid(1, 1, 14))
    with pytest.raises(errors.InvalidRequest, match="an image of 7 tiles cannot be sent as embeddings"):
        encoded(joined, kept=14).as_embeds()


PHOTO_CHUNKS = chunks(0, values(4, 0), None)
CLIP_CHUNKS = chunks(1, values(18, 1), None)


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        (CLIP_CHUNKS, r"items \[1\], expected 2 items"),
        (PHOTO_CHUNKS + CLIP_CHUNKS[:1], "after 720 of 1440 bytes of item 1"),
        (chunks(0, values(4, 0)[1:], None) + CLIP_CHUNKS, r"\[4, 4, 5\], got float32 \[3, 4, 5\]"),
        (chunks(0, values(4, 0), None, DType.INT32) + CLIP_CHUNKS, "expected bfloat16 or float16 or float32"),
        (PHOTO_CHUNKS + chunks(1, values(9, 1), list(range(9))), "if and only if tokens are dropped"),
    ],
    ids=["no photo", "cut short", "levels", "integers", "pruned"],
)
async def test_an_encoder_that_breaks_the_contract_is_an_error(tmp_path: Path, pieces: Chunks, message: str) -> None:
    with pytest.raises(errors.PeerContract, match=message):
        await ask(tmp_path, pieces)


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        (range(8), r"must keep 9 tokens, .* shape \[8\]"),
        ([0, *range(8)], "increase strictly"),
        (range(10, 19), "below 18"),
    ],
    ids=["fewer", "repeated", "out of range"],
)
async def test_an_encoder_that_keeps_other_tokens_is_an_error(
    tmp_path: Path, kept: Sequence[int], message: str
) -> None:
    pieces = PHOTO_CHUNKS + chunks(1, values(len(kept), 1), list(kept))
    with pytest.raises(errors.PeerContract, match=message):
        await ask(tmp_path, pieces, rate=0.5)


async def test_a_plan_of_other_media_is_rejected(tmp_path: Path) -> None:
    alone = dataclasses.replace(PLAN, media=(CLIP,))
    with pytest.raises(errors.PeerContract, match="the prompt has 2 media, the plan 1"):
        await ask(tmp_path, PHOTO_CHUNKS + CLIP_CHUNKS, alone)
