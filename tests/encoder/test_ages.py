"""Stage ages: how long ago an item left each stage, in this service and in preprocessing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from gridsieve.common.contract import errors
from gridsieve.v1.encoder_pb2 import EncodeResponse, StageAges
from gridsieve.v1.preprocessing_pb2 import PreprocessResponse
from tests.common.loopback import TIMEOUT_S
from tests.encoder.encoder_peers import GRID, VIDEO, brought, video
from tests.encoder.encoder_service import SELECT_ALL, Stack, first_request


def ages_in(responses: Sequence[EncodeResponse]) -> StageAges:
    """Of the only item, which is sent in one piece."""
    (ages,) = (response.embeds.ages for response in responses if response.HasField("embeds"))
    return ages


def aged(
    decoded_s: float, resized_s: float, last: int = -1
) -> Callable[[list[PreprocessResponse]], list[PreprocessResponse]]:
    """Sets the ages of frames. last: the slice that was done last; those beside it are TIMEOUT_S older, and so on."""

    def bend(messages: list[PreprocessResponse]) -> list[PreprocessResponse]:
        for number, message in enumerate(messages):
            later_s = TIMEOUT_S * abs(number - last % len(messages))
            message.frames.decoded_ago_s = decoded_s + later_s
            message.frames.resized_ago_s = resized_s + later_s
        return messages

    return bend


@pytest.mark.parametrize("last", [-1, 1])
async def test_ages_are_those_of_the_slice_that_was_done_last_in_the_order_of_stages(stack: Stack, last: int) -> None:
    """Where several workers decode a video, its last slice may be done before others."""
    stack.preprocessing.bend_frames = aged(50, 40, last)
    made = ages_in(await stack.encode(first_request([video(3)], 0.5), SELECT_ALL))
    assert 50 <= made.decoded_s < 50 + TIMEOUT_S
    assert 40 <= made.resized_s < 40 + TIMEOUT_S
    assert TIMEOUT_S > made.begun_s > made.encoded_s > made.pruned_s > 0
    cached = ages_in(await stack.encode(first_request([video(3)], 0.25), SELECT_ALL))
    assert cached.decoded_s > made.decoded_s
    assert cached.encoded_s > cached.begun_s > cached.pruned_s > 0  # encoded before this request joined


async def test_brought_embeddings_have_no_ages_of_decoding_and_resizing(stack: Stack) -> None:
    embeds = torch.zeros(1 + stack.tower.embed_levels, GRID.tokens, stack.tower.embed_dim)
    ages = ages_in(await stack.encode(first_request([brought(embeds)], 0.5), SELECT_ALL))
    assert not ages.HasField("decoded_s")
    assert not ages.HasField("resized_s")
    assert TIMEOUT_S > ages.begun_s > ages.encoded_s > ages.pruned_s > 0


async def test_the_age_of_fetching_is_passed_on_with_the_plan(stack: Stack) -> None:
    stack.preprocessing.fetched_ago_s = 7.0
    plan, *_ = await stack.encode(first_request([VIDEO]))
    assert 7 < plan.fetched_ago_s < 7 + TIMEOUT_S


@pytest.mark.parametrize("wrong_s", [-1.0, float("nan")])
async def test_impossible_ages_of_preprocessing_break_the_contract(stack: Stack, wrong_s: float) -> None:
    for bend in (aged(wrong_s, 0), aged(0, wrong_s)):
        stack.preprocessing.bend_frames = bend
        with pytest.raises(errors.PeerContract):
            await stack.encode(first_request([VIDEO]), SELECT_ALL)
    stack.preprocessing.fetched_ago_s = wrong_s
    with pytest.raises(errors.PeerContract):
        await stack.encode(first_request([VIDEO]))
    stack.preprocessing.fetched_ago_s = None
    await stack.check_served()
