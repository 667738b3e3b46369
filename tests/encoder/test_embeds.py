"""Embeddings that come with a prompt: checked, withheld from preprocessing, then pruned and sent like encoded ones."""

from __future__ import annotations

import asyncio
import hashlib
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from common.contract import errors
from common.contract.plan import Grid, PromptPlan
from common.contract.requests import MAX_INLINE_BYTES
from framesieve.v1 import tensor_pb2
from services.encoder.rpc.messages import take_embeds
from services.encoder.tower.tower import Tower
from tests.encoder.encoder_peers import GRID, IMAGE, VIDEO, WIRE_DTYPES, brought, media_with, other_item, tensor_message
from tests.encoder.encoder_service import (
    SELECT_ALL,
    Received,
    Stack,
    check_served,
    embeds_in,
    encode,
    first_request,
    kept_bytes,
    running,
    select,
    tower_embeds,
)

FIELD = r"^prompt\.messages\[0\]\.parts\[1\]\.video\.embeds\."


@pytest.fixture
async def stack(tmp_path: Path, tower: Tower) -> AsyncIterator[Stack]:
    # One slice per forward, so that a slice is encoded to the same bits each time.
    async with running(tmp_path, tower, budget_tokens=1) as stack:
        yield stack


def random_embeds(tower: Tower, seed: int, grid: Grid = GRID) -> Tensor:
    shape = (1 + tower.embed_levels, grid.tokens, tower.embed_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def as_sent(item: Received) -> tensor_pb2.Tensor:
    return tensor_pb2.Tensor(dtype=tensor_pb2.DTYPE_FLOAT32, shape=item.shape, data=item.data)


# --- what is answered -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rate", "method"), [(0.0, ""), (0.5, "evs"), (0.5, "vidcom2"), (0.75, "random")])
async def test_embeddings_brought_back_are_answered_like_their_media(stack: Stack, rate: float, method: str) -> None:
    media = [VIDEO, IMAGE]
    unpruned = embeds_in(await encode(stack, first_request(media), SELECT_ALL))
    again = [media_with(as_sent(unpruned[index]), each.grid, each.modality) for index, each in enumerate(media)]
    from_pixels = embeds_in(await encode(stack, first_request(media, rate, method), SELECT_ALL))
    from_embeds = embeds_in(await encode(stack, first_request(again, rate, method), SELECT_ALL))
    assert from_embeds == from_pixels
    assert stack.held_bytes == 0


async def test_preprocessing_gets_a_digest_in_place_of_the_tensor(stack: Stack) -> None:
    media = brought(random_embeds(stack.tower, 1))
    assert media.embeds is not None
    media.embeds.digest = b"a digest of the caller is ignored"
    await encode(stack, first_request([IMAGE, media], 0.5), SELECT_ALL)
    (prompt,) = stack.preprocessing.prompts
    passed_on = prompt.messages[0].parts[1].video.embeds
    assert not passed_on.HasField("tensor")
    assert passed_on.digest == hashlib.sha256(struct.pack("<i", 6) + media.embeds.tensor.data).digest()
    assert (passed_on.grid, passed_on.seconds_per_grid) == (media.embeds.grid, media.embeds.seconds_per_grid)
    assert prompt.messages[0].parts[2].text == "What moves?"


@pytest.mark.parametrize("order", [(2, 1, 0), (1, 2, 0)], ids=str)
async def test_embeddings_and_pixels_are_answered_in_the_order_of_selection(stack: Stack, order: Sequence[int]) -> None:
    first, last = random_embeds(stack.tower, 1), random_embeds(stack.tower, 2, Grid(3, 1, 2))
    media = [brought(first), VIDEO, brought(last, Grid(3, 1, 2))]
    responses = await encode(stack, first_request(media), *map(select, order))
    received = embeds_in(responses)
    progress = [each.progress for each in responses if each.HasField("progress") and each.progress.media_index != 1]
    assert {(each.media_index, each.decoded_slices, each.encoded_slices) for each in progress} == {(0, 4, 4), (2, 3, 3)}
    assert list(received) == list(order)
    for index, expected in enumerate([first, tower_embeds(stack.tower, 1, VIDEO), last]):
        np.testing.assert_array_equal(received[index].embeds, expected.numpy())
    assert stack.preprocessing.selected == [1]
    assert stack.cache.held_bytes == kept_bytes(stack.tower)  # embeddings that were brought are not cached


@pytest.mark.parametrize("dtype", list(WIRE_DTYPES), ids=str)
async def test_every_float_dtype_is_converted_to_the_towers(stack: Stack, dtype: torch.dtype) -> None:
    embeds = random_embeds(stack.tower, 1).to(dtype)
    received = embeds_in(await encode(stack, first_request([brought(embeds)]), SELECT_ALL))
    np.testing.assert_array_equal(received[0].embeds, embeds.float().numpy())


# --- what is refused --------------------------------------------------------------------------------------------


def at(value: float, level: int) -> Callable[[Tensor], tensor_pb2.Tensor]:
    def change(embeds: Tensor) -> tensor_pb2.Tensor:
        embeds[level, 2, 3] = value
        return tensor_message(embeds)

    return change


def mislabelled(**changes: Any) -> Callable[[Tensor], tensor_pb2.Tensor]:
    def change(embeds: Tensor) -> tensor_pb2.Tensor:
        message = tensor_message(embeds)
        return tensor_pb2.Tensor(
            dtype=changes.get("dtype", message.dtype), shape=message.shape, data=changes.get("data", message.data)
        )

    return change


BENT_TENSORS: dict[str, tuple[Callable[[Tensor], tensor_pb2.Tensor], str]] = {
    "no tensor": (lambda embeds: tensor_pb2.Tensor(), r"tensor\.dtype must be BFLOAT16, FLOAT16 or FLOAT32, got 0$"),
    "integers": (mislabelled(dtype=tensor_pb2.DTYPE_INT32), r"tensor\.dtype must be .* got 2$"),
    "a type that does not exist": (mislabelled(dtype=99), r"tensor\.dtype must be .* got 99$"),
    "one level too many": (lambda embeds: tensor_message(torch.cat([embeds, embeds[:1]])), r"tensor\.shape must be"),
    "no level": (lambda embeds: tensor_message(embeds[:0]), r"tensor\.shape must be \[.*got \[0, "),
    "levels left out": (lambda embeds: tensor_message(embeds[0]), r"tensor\.shape must be \[.*got \[24, "),
    "a token missing": (
        lambda embeds: tensor_message(embeds[:, 1:]),
        r"tensor\.shape must be \[\d, 24, .*got \[\d, 23,",
    ),
    "another width": (lambda embeds: tensor_message(embeds[..., 1:]), r"tensor\.shape must be"),
    "bytes missing": (mislabelled(data=b"1234"), r"tensor\.data must have \d+ bytes, got 4$"),
    "bytes of another type": (
        mislabelled(dtype=tensor_pb2.DTYPE_FLOAT16),
        r"tensor\.data must have \d+ bytes, got \d+$",
    ),
    "NaN": (at(torch.nan, 0), r"tensor must be finite in float32, got nan at \[0, 2, 3\]$"),
    "infinity in the last level": (at(-torch.inf, -1), r"tensor must be finite in float32, got -inf at \[\d, 2, 3\]$"),
}


@pytest.mark.parametrize(("bend", "complaint"), BENT_TENSORS.values(), ids=BENT_TENSORS.keys())
async def test_embeddings_that_the_tower_could_not_produce_are_refused_by_field(
    stack: Stack, bend: Callable[[Tensor], tensor_pb2.Tensor], complaint: str
) -> None:
    media = media_with(bend(random_embeds(stack.tower, 1)))
    with pytest.raises(errors.InvalidRequest, match=FIELD + complaint):
        await encode(stack, first_request([IMAGE, media]), SELECT_ALL)
    assert stack.preprocessing.prompts == []
    await check_served(stack)


def test_values_that_overflow_in_the_towers_dtype_are_refused(tower: Tower) -> None:
    embeds = random_embeds(tower, 1)
    embeds[0, 5, 7] = 3.4e38  # finite in float32; the largest bfloat16 is 3.39e38
    prompt = first_request([IMAGE, brought(embeds)]).prompt.prompt
    with pytest.raises(errors.InvalidRequest, match=FIELD + r"tensor must be finite in bfloat16, got 3\.4e\+38 at"):
        take_embeds(prompt, replace(tower, dtype=torch.bfloat16))


@pytest.mark.parametrize("sides", [(0, 2, 3), (2**30, 2**30, 1)])
async def test_a_grid_out_of_range_is_refused(stack: Stack, sides: tuple[int, int, int]) -> None:
    media = brought(random_embeds(stack.tower, 1))
    assert media.embeds is not None
    media.embeds.grid.t, media.embeds.grid.h, media.embeds.grid.w = sides
    with pytest.raises(errors.InvalidRequest, match=FIELD + r"grid is out of range: .*" + "×".join(map(str, sides))):
        await encode(stack, first_request([IMAGE, media]), SELECT_ALL)


@pytest.mark.parametrize("beyond", [0, 1])
async def test_files_and_embeddings_count_together_against_the_inline_limit(stack: Stack, beyond: int) -> None:
    media = brought(random_embeds(stack.tower, 1))
    assert media.embeds is not None
    request = first_request([IMAGE, media])
    picture = request.prompt.prompt.messages[0].parts[0].image
    picture.data = bytes(MAX_INLINE_BYTES - len(media.embeds.tensor.data) + beyond)
    if beyond:
        with pytest.raises(errors.InvalidRequest, match=rf"hold {MAX_INLINE_BYTES + 1} bytes .* at most"):
            await encode(stack, request)
    else:
        await encode(stack, request, select(1))
    assert len(stack.preprocessing.prompts) == 1 - beyond


# --- a plan that does not fit -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bend",
    [
        pytest.param(lambda plan: other_item(plan, grid=Grid(2, 4, 3)), id="another grid of as many tokens"),
        pytest.param(
            lambda plan: other_item(plan, frames=8, frame_height_px=64, frame_width_px=96), id="frames to decode"
        ),
    ],
)
async def test_a_plan_that_does_not_fit_the_embeddings_breaks_the_contract(
    stack: Stack, bend: Callable[[PromptPlan], PromptPlan]
) -> None:
    stack.preprocessing.bend_plan = bend
    with pytest.raises(errors.PeerContract):
        await encode(stack, first_request([brought(random_embeds(stack.tower, 1))]), SELECT_ALL)
    await check_served(stack)


# --- bytes ------------------------------------------------------------------------------------------------------


async def test_brought_embeddings_wait_for_bytes_like_encoded_ones(tmp_path: Path, tower: Tower) -> None:
    embeds = random_embeds(tower, 1)
    async with running(tmp_path, tower, room_bytes=embeds.nbytes) as stack:
        media = [brought(embeds), VIDEO, brought(embeds)]
        answers = await asyncio.gather(*(encode(stack, first_request(media, 0.5), SELECT_ALL) for _ in range(6)))
        assert [list(embeds_in(answer)) for answer in answers] == [[0, 1, 2]] * 6
        assert stack.held_bytes == 0
