"""Embeddings kept by content: what a second question costs, and how much is kept."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from common.contract.plan import Grid
from common.contract.retention import Pruning
from framesieve.v1.preprocessing_pb2 import PreprocessResponse
from services.encoder.pruning.methods import keep_tokens
from services.encoder.tower.tower import Tower
from tests.encoder.encoder_peers import GRID, IMAGE, VIDEO, video
from tests.encoder.encoder_service import (
    SELECT_ALL,
    Stack,
    check_idle,
    embeds_in,
    encode,
    first_request,
    kept_bytes,
    metric,
    opened,
    read_all,
    running,
    stalled,
    waiters,
)

# --- a second question ------------------------------------------------------------------------------------------


async def test_a_second_question_decodes_and_encodes_nothing_and_is_answered_to_the_bit(stack: Stack) -> None:
    media = [VIDEO, IMAGE]
    first = embeds_in(await encode(stack, first_request(media, 0.5), SELECT_ALL))
    hits = metric("cache_lookups_total", outcome="hit")
    forwards = metric("batch_tokens_count")
    assert embeds_in(await encode(stack, first_request(media, 0.5), SELECT_ALL)) == first
    assert stack.preprocessing.selected == [0, 1]
    assert metric("batch_tokens_count") == forwards
    assert metric("cache_lookups_total", outcome="hit") == hits + 2


@pytest.mark.parametrize(("rate", "method"), [(0.25, "evs"), (0.75, "evs"), (0.5, "vidcom2"), (0.5, "random")])
async def test_another_rate_or_method_is_gathered_from_what_was_kept(stack: Stack, rate: float, method: str) -> None:
    await encode(stack, first_request([VIDEO], 0.5), SELECT_ALL)
    unpruned = embeds_in(await encode(stack, first_request([VIDEO]), SELECT_ALL))[0].embeds
    pruned = embeds_in(await encode(stack, first_request([VIDEO], rate, method), SELECT_ALL))[0]
    kept = keep_tokens(torch.from_numpy(unpruned[0].copy()), GRID, Pruning(rate, method)).tolist()
    assert pruned.kept == kept
    np.testing.assert_array_equal(pruned.embeds, unpruned[:, kept])
    assert stack.preprocessing.selected == [0]


async def test_the_same_video_elsewhere_in_another_prompt_is_the_same_video(stack: Stack) -> None:
    first = embeds_in(await encode(stack, first_request([video(7)]), SELECT_ALL))
    again = embeds_in(await encode(stack, first_request([IMAGE, video(8), video(7)]), SELECT_ALL))
    assert again[2] == first[0]
    assert stack.preprocessing.selected == [0, 0, 1]


async def test_a_video_twice_in_one_prompt_is_decoded_once(stack: Stack) -> None:
    received = embeds_in(await encode(stack, first_request([video(7), video(7)]), SELECT_ALL))
    assert received[0] == received[1]
    assert stack.preprocessing.selected == [0]


async def test_what_is_kept_is_told_as_complete_progress_before_the_embeddings(stack: Stack) -> None:
    await encode(stack, first_request([VIDEO]), SELECT_ALL)
    responses = await encode(stack, first_request([VIDEO]), SELECT_ALL)
    assert [response.WhichOneof("response") for response in responses] == ["plan", "progress", "embeds"]
    assert (responses[1].progress.decoded_slices, responses[1].progress.encoded_slices) == (GRID.t, GRID.t)


async def test_repaired_frames_are_remembered(stack: Stack) -> None:
    def repair(messages: list[PreprocessResponse]) -> list[PreprocessResponse]:
        for message in messages[:2]:
            message.frames.repaired_frames = 1
        return messages

    stack.preprocessing.bend_frames = repair
    for _ in range(2):
        responses = await encode(stack, first_request([VIDEO]), SELECT_ALL)
        (repaired,) = [each.embeds.repaired_frames for each in responses if each.HasField("embeds")]
        assert repaired == 2
    assert stack.preprocessing.selected == [0]


# --- how much is kept -------------------------------------------------------------------------------------------


async def test_the_least_recently_used_gives_way_and_the_bound_is_kept(tmp_path: Path, tower: Tower) -> None:
    async with running(tmp_path, tower, cache_bytes=2 * kept_bytes(tower)) as stack:
        evictions = metric("cache_evictions_total")
        for content in (1, 2, 1, 3, 1, 2):  # 3 takes the place of 2, and 2 that of 3
            await encode(stack, first_request([video(content)]), SELECT_ALL)
            assert metric("cache_used_bytes") == stack.cache.held_bytes <= 2 * kept_bytes(tower)
        assert len(stack.preprocessing.selected) == 4
        assert metric("cache_evictions_total") == evictions + 2
        await check_idle(stack)


async def test_a_large_item_takes_the_place_of_several(tmp_path: Path, tower: Tower) -> None:
    async with running(tmp_path, tower, cache_bytes=2 * kept_bytes(tower)) as stack:
        large = video(3, Grid(8, 2, 3))
        for media in (video(1), video(2), large, large, video(1)):
            await encode(stack, first_request([media]), SELECT_ALL)
        assert len(stack.preprocessing.selected) == 4
        assert stack.cache.held_bytes == kept_bytes(tower)


async def test_an_item_larger_than_the_cache_is_served_and_makes_nobody_give_way(tmp_path: Path, tower: Tower) -> None:
    async with running(tmp_path, tower, cache_bytes=kept_bytes(tower)) as stack:
        for media in (VIDEO, video(9, Grid(5, 2, 3)), video(9, Grid(5, 2, 3)), VIDEO):
            await encode(stack, first_request([media]), SELECT_ALL)
        assert len(stack.preprocessing.selected) == 3
        await check_idle(stack)


async def test_without_a_cache_nothing_is_kept_and_a_pass_is_still_shared(tmp_path: Path, tower: Tower) -> None:
    async with running(tmp_path, tower, cache_bytes=0) as stack:
        calls = [await stalled(stack, VIDEO), opened(stack, VIDEO)]
        await waiters(2)
        stack.preprocessing.resumed.set()
        first, second = [embeds_in(await read_all(call)) for call in calls]
        assert first == second
        assert stack.preprocessing.selected == [0]
        await encode(stack, first_request([VIDEO]), SELECT_ALL)
        assert stack.preprocessing.selected == [0, 0]
        assert stack.cache.held_bytes == 0
