"""How long ago an item left each stage, as the encoder tells it, and passes it on from preprocessing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import pytest

from common.contract import errors
from common.contract.plan import Modality
from common.contract.wire import grid_message
from framesieve.v1 import prompt_pb2, tensor_pb2
from framesieve.v1.encoder_pb2 import EncodeResponse, StageAges
from framesieve.v1.preprocessing_pb2 import PreprocessResponse
from services.encoder.tower.tower import Tower
from tests.common.loopback import TIMEOUT_S
from tests.encoder.encoder_peers import GRID, VIDEO, Media, video
from tests.encoder.encoder_service import SELECT_ALL, Stack, check_served, encode, first_request

Bend: TypeAlias = Callable[[list[PreprocessResponse]], list[PreprocessResponse]]

WRONG_S = (-1.0, float("nan"), float("inf"))


def ages_in(responses: Sequence[EncodeResponse]) -> StageAges:
    """Of the only item, told with its first piece alone."""
    first, *others = (response.embeds for response in responses if response.HasField("embeds"))
    assert first.HasField("ages")
    assert not any(piece.HasField("ages") for piece in others)
    return first.ages


def aged(decoded_s: float, resized_s: float) -> Bend:
    """Bends frames to have been decoded and resized so long ago, each slice a second after the one before it."""

    def bend(messages: list[PreprocessResponse]) -> list[PreprocessResponse]:
        for later_s, message in enumerate(reversed(messages)):
            message.frames.decoded_ago_s = decoded_s + later_s
            message.frames.resized_ago_s = resized_s + later_s
        return messages

    return bend


def brought(tower: Tower) -> Media:
    shape = (1 + tower.embed_levels, GRID.tokens, tower.embed_dim)
    data = bytes(4 * shape[0] * shape[1] * shape[2])
    tensor = tensor_pb2.Tensor(dtype=tensor_pb2.DTYPE_FLOAT32, shape=shape, data=data)
    step = prompt_pb2.Rational(numerator=1, denominator=1)
    embeds = prompt_pb2.MediaEmbeds(tensor=tensor, grid=grid_message(GRID), seconds_per_grid=step)
    return Media(Modality.VIDEO, GRID, embeds)


async def test_stages_are_told_by_the_last_slice_in_their_order(stack: Stack) -> None:
    stack.preprocessing.bend_frames = aged(decoded_s=50, resized_s=40)
    ages = ages_in(await encode(stack, first_request([VIDEO], 0.5), SELECT_ALL))
    assert 50 <= ages.decoded_s < 50 + TIMEOUT_S
    assert 40 <= ages.resized_s < 40 + TIMEOUT_S
    assert TIMEOUT_S > ages.begun_s > ages.encoded_s > ages.pruned_s > 0


async def test_what_was_kept_left_its_stages_when_it_was_made_and_begins_anew_with_its_room(stack: Stack) -> None:
    stack.preprocessing.bend_frames = aged(decoded_s=50, resized_s=40)
    made = ages_in(await encode(stack, first_request([video(3)], 0.5), SELECT_ALL))
    kept = ages_in(await encode(stack, first_request([video(3)], 0.25), SELECT_ALL))
    assert kept.decoded_s > made.decoded_s
    assert kept.encoded_s > kept.begun_s > kept.pruned_s > 0  # encoded before this request had room


async def test_what_was_brought_was_neither_decoded_nor_resized(stack: Stack) -> None:
    ages = ages_in(await encode(stack, first_request([brought(stack.tower)], 0.5), SELECT_ALL))
    assert not ages.HasField("decoded_s")
    assert not ages.HasField("resized_s")
    assert TIMEOUT_S > ages.begun_s > ages.encoded_s > ages.pruned_s > 0


async def test_when_media_had_been_fetched_is_passed_on_with_the_plan(stack: Stack) -> None:
    plan, *_ = await encode(stack, first_request([VIDEO]))
    assert not plan.HasField("fetched_ago_s")
    stack.preprocessing.fetched_ago_s = 7.0
    plan, *_ = await encode(stack, first_request([VIDEO]))
    assert 7 < plan.fetched_ago_s < 7 + TIMEOUT_S


@pytest.mark.parametrize("wrong_s", WRONG_S)
async def test_moments_of_preprocessing_that_cannot_have_been_break_the_contract(stack: Stack, wrong_s: float) -> None:
    for bend in (aged(wrong_s, 0), aged(0, wrong_s)):
        stack.preprocessing.bend_frames = bend
        with pytest.raises(errors.PeerContract):
            await encode(stack, first_request([VIDEO]), SELECT_ALL)
    await check_served(stack)
    stack.preprocessing.fetched_ago_s = wrong_s
    with pytest.raises(errors.PeerContract):
        await encode(stack, first_request([VIDEO]))
    stack.preprocessing.fetched_ago_s = None
    await check_served(stack)


async def test_frames_that_are_older_than_anything_harm_nothing(stack: Stack) -> None:
    stack.preprocessing.bend_frames = aged(1e300, 1e300)
    ages = ages_in(await encode(stack, first_request([VIDEO]), SELECT_ALL))
    assert ages.decoded_s > 1e6
    await check_served(stack)
