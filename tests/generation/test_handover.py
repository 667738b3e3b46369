"""Embeddings in shared memory at generation's door, how their values are checked, and which items are the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from gridsieve.common.contract import errors
from gridsieve.common.sealed_memory import SealedMemory, sealed
from gridsieve.services.generation.request.encoded_media import MediaItem
from gridsieve.services.generation.upstream.arriving_item import ArrivingItem
from tests.generation.generation_peers import Encoder, embeds_messages, prompt_plan
from tests.generation.media_client import (
    FINGERPRINT,
    IMAGE,
    IMAGE_EMBEDS,
    KEPT,
    MODEL,
    PLAN,
    VIDEO_EMBEDS,
    ask,
    client_of,
)


def memory_of(content: bytes) -> SealedMemory:
    return SealedMemory(sealed(memoryview(content)))


def unsealed(content: bytes) -> SealedMemory:
    memory = SealedMemory()
    memory.write(memoryview(content))
    return memory


ITEMS = [*embeds_messages(0, VIDEO_EMBEDS, KEPT), *embeds_messages(1, IMAGE_EMBEDS, None)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_items_handed_over_equal_those_in_messages(tmp_path: Path, dtype: torch.dtype) -> None:
    encoder = Encoder(PLAN, ITEMS, hand_over=memory_of)
    async with client_of(tmp_path, encoder, model=replace(MODEL, dtype=dtype)) as (client, room):
        received = [each for each in await ask(client) if isinstance(each, MediaItem)]
        assert room.held_bytes == 0
    assert [each.media_index for each in received] == [0, 1]
    assert received[0].kept is not None
    assert (received[0].kept.tolist(), received[1].kept) == (KEPT, None)
    for item, sent in zip(received, (VIDEO_EMBEDS, IMAGE_EMBEDS), strict=True):
        assert torch.equal(item.embeds, torch.from_numpy(sent).to(dtype))


@pytest.mark.parametrize(
    "make",
    [unsealed, lambda content: memory_of(content[1:]), lambda content: memory_of(content + b"!")],
    ids=["unsealed", "too small", "too large"],
)
async def test_memory_that_could_change_or_has_another_size_ends_the_call_and_releases_its_bytes(
    tmp_path: Path, make: Callable[[bytes], SealedMemory]
) -> None:
    async with client_of(tmp_path, Encoder(PLAN, ITEMS, hand_over=make)) as (client, room):
        with pytest.raises(errors.PeerContract, match="shared memory has"):
            await ask(client)
        assert room.held_bytes == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), -float("inf")])
def test_a_value_that_is_not_finite_is_found_at_every_place(dtype: torch.dtype, value: float) -> None:
    """Whether in a vector of values that are compared at once, or after the last of these."""
    (image,) = prompt_plan(FINGERPRINT, 1, IMAGE, 1).media
    model = replace(MODEL, hidden_size=37, dtype=dtype)
    sent = np.random.default_rng(0).standard_normal((1, 4, 37)).astype(np.float32)
    for place in range(sent.size):
        wrong = sent.copy()
        wrong.flat[place] = value
        item = ArrivingItem(0, image, 4, model)
        for message in embeds_messages(0, wrong, None):
            item.take_piece(message.embeds, 0)
        with pytest.raises(errors.PeerContract, match="not finite"):
            item.finish()


def received(encoding: bytes, kept: list[int], embeds: np.ndarray) -> bytes:
    item = ArrivingItem(0, PLAN.media[0], len(kept), MODEL)
    for message in embeds_messages(0, embeds, kept):
        if message.embeds.HasField("kept"):
            message.embeds.encoding = encoding
        item.take_piece(message.embeds, 0)
    arrived = item.finish()
    assert arrived
    return arrived.digest


def test_items_have_the_same_rows_if_their_encoding_has_the_same_name() -> None:
    one, other = bytes(32), bytes(31) + b"1"
    assert received(one, KEPT, VIDEO_EMBEDS) == received(one, [*KEPT[:-1], 10], VIDEO_EMBEDS)
    assert received(one, KEPT, VIDEO_EMBEDS) != received(other, KEPT, VIDEO_EMBEDS)
    assert received(b"", KEPT, VIDEO_EMBEDS) != received(b"", KEPT, VIDEO_EMBEDS)
