"""Embeddings that come with a prompt: checked, withheld from preprocessing, then pruned and sent like encoded ones."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from gridsieve.common.contract import errors
from gridsieve.common.contract.limits import MAX_INLINE_BYTES
from gridsieve.common.contract.plan import Grid
from gridsieve.services.encoder.rpc.messages import take_embeds
from gridsieve.services.encoder.tower.tower import Tower
from gridsieve.v1 import tensor_pb2
from tests.encoder.encoder_peers import GRID, IMAGE, VIDEO, WIRE_DTYPES, brought, media_with, tensor_message
from tests.encoder.encoder_service import (
    SELECT_ALL,
    Stack,
    embeds_in,
    first_request,
    kept_bytes,
    read_all,
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


async def test_preprocessing_gets_a_digest_in_place_of_the_tensor(stack: Stack) -> None:
    media = brought(random_embeds(stack.tower, 1))
    assert media.embeds is not None
    media.embeds.digest = b"a digest of the caller is ignored"
    await stack.encode(first_request([IMAGE, media], 0.5), SELECT_ALL)
    (prompt,) = stack.preprocessing.prompts
    passed_on = prompt.messages[0].parts[1].video.embeds
    assert not passed_on.HasField("tensor")
    assert passed_on.digest == hashlib.sha256(struct.pack("<i", 6) + media.embeds.tensor.data).digest()
    assert (passed_on.grid, passed_on.seconds_per_grid) == (media.embeds.grid, media.embeds.seconds_per_grid)


async def test_embeddings_and_pixels_are_answered_in_the_order_of_selection(stack: Stack) -> None:
    first, last = random_embeds(stack.tower, 1), random_embeds(stack.tower, 2, Grid(3, 1, 2))
    media = [brought(first), VIDEO, brought(last, Grid(3, 1, 2))]
    responses = await stack.encode(first_request(media), select(1), select(2), select(0))
    progress = [each.progress for each in responses if each.HasField("progress") and each.progress.media_index != 1]
    assert {(each.media_index, each.decoded_slices, each.encoded_slices) for each in progress} == {(0, 4, 4), (2, 3, 3)}
    received = embeds_in(responses)
    assert list(received) == [1, 2, 0]
    for index, expected in enumerate([first, tower_embeds(stack.tower, 1, VIDEO), last]):
        np.testing.assert_array_equal(received[index].embeds, expected.numpy())
    assert stack.preprocessing.selected == [1]
    assert stack.cache.held_bytes == kept_bytes(stack.tower)  # embeddings that were brought are not cached


@pytest.mark.parametrize("dtype", list(WIRE_DTYPES), ids=str)
async def test_every_float_dtype_is_converted_to_the_towers(stack: Stack, dtype: torch.dtype) -> None:
    embeds = random_embeds(stack.tower, 1).to(dtype)
    received = embeds_in(await stack.encode(first_request([brought(embeds)]), SELECT_ALL))
    np.testing.assert_array_equal(received[0].embeds, embeds.float().numpy())


async def test_brought_embeddings_wait_for_bytes_like_encoded_ones(tmp_path: Path, tower: Tower) -> None:
    embeds = random_embeds(tower, 1)
    async with running(tmp_path, tower, buffer_bytes=embeds.nbytes) as stack:
        calls = [stack.opened(brought(embeds), VIDEO, brought(embeds), rate=0.5) for _ in range(6)]
        assert [list(embeds_in(await read_all(call))) for call in calls] == [[0, 1, 2]] * 6
        await stack.check_idle()


def relabelled(message: tensor_pb2.Tensor, dtype: tensor_pb2.DType) -> tensor_pb2.Tensor:
    return tensor_pb2.Tensor(dtype=dtype, shape=message.shape, data=message.data)


def with_infinity(embeds: Tensor) -> tensor_pb2.Tensor:
    embeds[-1, 2, 3] = -torch.inf
    return tensor_message(embeds)


@pytest.mark.parametrize(
    ("bend", "complaint"),
    [
        (lambda embeds: relabelled(tensor_message(embeds), tensor_pb2.DTYPE_INT32), r"tensor\.dtype must be .* got 2$"),
        (lambda embeds: tensor_message(embeds[:-1]), r"tensor\.shape must be \[3, 24, 64\], .* got \[2, 24, 64\]$"),
        (lambda embeds: tensor_message(embeds[:, 1:]), r"tensor\.shape must be \[3, 24, 64\], .* got \[3, 23, 64\]$"),
        (lambda embeds: tensor_message(embeds[..., 1:]), r"tensor\.shape must be \[3, 24, 64\], .* got \[3, 24, 63\]$"),
        (
            lambda embeds: relabelled(tensor_message(embeds), tensor_pb2.DTYPE_FLOAT16),
            r"tensor\.data must have 9216 bytes, got 18432$",
        ),
        (with_infinity, r"tensor must be finite in float32, got -inf at \[2, 2, 3\]$"),
    ],
)
async def test_embeddings_that_the_tower_could_not_produce_are_refused_by_field(
    stack: Stack, bend: Callable[[Tensor], tensor_pb2.Tensor], complaint: str
) -> None:
    media = media_with(bend(random_embeds(stack.tower, 1)))
    with pytest.raises(errors.InvalidRequest, match=FIELD + complaint):
        await stack.encode(first_request([IMAGE, media]), SELECT_ALL)
    assert stack.preprocessing.prompts == []
    await stack.check_served()


def test_values_that_overflow_in_the_towers_dtype_are_refused(tower: Tower) -> None:
    embeds = random_embeds(tower, 1)
    embeds[0, 5, 7] = 3.4e38  # finite in float32; the largest bfloat16 is 3.39e38
    prompt = first_request([IMAGE, brought(embeds)]).prompt.prompt
    with pytest.raises(errors.InvalidRequest, match=FIELD + r"tensor must be finite in bfloat16, got 3\.4e\+38 at"):
        take_embeds(prompt, replace(tower, dtype=torch.bfloat16))


async def test_a_grid_out_of_range_is_refused(stack: Stack) -> None:
    media = brought(random_embeds(stack.tower, 1))
    assert media.embeds is not None
    media.embeds.grid.t = media.embeds.grid.h = 2**30
    with pytest.raises(errors.InvalidRequest, match=FIELD + r"grid is out of range: .*1073741824"):
        await stack.encode(first_request([IMAGE, media]), SELECT_ALL)


async def test_files_and_embeddings_count_together_against_the_inline_limit(stack: Stack) -> None:
    media = brought(random_embeds(stack.tower, 1))
    assert media.embeds is not None
    request = first_request([IMAGE, media])
    picture = request.prompt.prompt.messages[0].parts[0].image
    picture.data = bytes(MAX_INLINE_BYTES - len(media.embeds.tensor.data) + 1)
    with pytest.raises(errors.InvalidRequest, match=rf"hold {MAX_INLINE_BYTES + 1} bytes .* is {MAX_INLINE_BYTES}"):
        await stack.encode(request)
    assert stack.preprocessing.prompts == []
