"""The encoder over a real socket: what it answers of every family, and which requests it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from common.contract import errors
from common.contract.plan import Grid, Modality
from common.contract.retention import Pruning
from framesieve.v1 import prompt_pb2, tensor_pb2
from framesieve.v1.encoder_pb2 import EncodeRequest
from services.encoder.pruning.methods import keep_tokens
from services.encoder.tower.tower import Tower
from tests.encoder.encoder_peers import GRID, IMAGE, VIDEO, Media
from tests.encoder.encoder_service import (
    SELECT_ALL,
    Stack,
    check_served,
    embeds_in,
    encode,
    first_request,
    running,
    select,
    tower_embeds,
    tower_of,
)

HALVES = {torch.bfloat16: tensor_pb2.DTYPE_BFLOAT16, torch.float16: tensor_pb2.DTYPE_FLOAT16}


@pytest.fixture(scope="module")
def tower(family_checkpoint: Path) -> Tower:
    return tower_of(family_checkpoint)


# --- what is answered -------------------------------------------------------------------------------------------


async def test_the_plan_comes_first_and_then_every_items_embeddings(stack: Stack) -> None:
    media = [VIDEO, IMAGE, Media(Modality.VIDEO, Grid(2, 3, 3))]
    responses = await encode(stack, first_request(media), SELECT_ALL)
    assert responses[0].HasField("plan")
    received = embeds_in(responses)
    assert list(received) == [0, 1, 2]
    for index, item in enumerate(media):
        expected = tower_embeds(stack.tower, index, item)
        assert received[index].kept is None
        assert received[index].shape == list(expected.shape)
        np.testing.assert_allclose(received[index].embeds, expected.numpy(), atol=2e-6)


@pytest.mark.parametrize("method", ["evs", "vidcom2"])
async def test_all_levels_are_gathered_from_the_unpruned_by_what_the_embedding_keeps(stack: Stack, method: str) -> None:
    received = embeds_in(await encode(stack, first_request([VIDEO, IMAGE], 0.5, method), SELECT_ALL))
    expected = tower_embeds(stack.tower, 0, VIDEO)
    kept = keep_tokens(expected[0], GRID, Pruning(0.5, method))
    assert received[0].kept == kept.tolist()
    np.testing.assert_allclose(received[0].embeds, expected[:, kept.long()].numpy(), atol=2e-6)
    assert received[1].kept is None  # images are never pruned
    assert received[1].shape == [1 + stack.tower.embed_levels, 6, stack.tower.embed_dim]


async def test_a_second_question_is_answered_from_all_levels_as_they_were_kept(stack: Stack) -> None:
    unpruned = embeds_in(await encode(stack, first_request([VIDEO]), SELECT_ALL))[0].embeds
    pruned = embeds_in(await encode(stack, first_request([VIDEO], 0.5), SELECT_ALL))[0]
    assert stack.preprocessing.selected == [0]
    np.testing.assert_array_equal(pruned.embeds, unpruned[:, pruned.kept])


@pytest.mark.parametrize(("dtype", "on_the_wire"), HALVES.items(), ids=str)
async def test_embeddings_travel_in_the_towers_own_type(
    tmp_path: Path, family_checkpoint: Path, dtype: torch.dtype, on_the_wire: int
) -> None:
    tower = tower_of(family_checkpoint, str(dtype).removeprefix("torch."))
    async with running(tmp_path, tower) as stack:
        responses = await encode(stack, first_request([VIDEO], rate=0.5), SELECT_ALL)
    sent = next(each.embeds.chunk for each in responses if each.HasField("embeds"))
    (received,) = embeds_in(responses).values()
    assert sent.dtype == on_the_wire
    expected = tower_embeds(tower, 0, VIDEO)[:, received.kept]
    found = torch.frombuffer(bytearray(received.data), dtype=dtype).view(received.shape)
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-2)


async def test_an_items_own_pruning_overrides_the_requests(stack: Stack) -> None:
    own = {1: prompt_pb2.Pruning(rate=0.25), 2: prompt_pb2.Pruning(rate=0.5, method="random", seed=3)}
    own[3] = prompt_pb2.Pruning(rate=0.5, method="none")
    received = embeds_in(await encode(stack, first_request([VIDEO] * 4, 0.75, own=own), SELECT_ALL))
    assert [item.shape[1] for item in received.values()] == [6, 18, 12, 24]
    assert received[2].kept == keep_tokens(torch.empty(24, 1), GRID, Pruning(0.5, "random", 3)).tolist()
    assert received[3].kept is None


async def test_only_what_is_selected_is_decoded_in_that_order(stack: Stack) -> None:
    responses = await encode(stack, first_request([VIDEO] * 4), select(2), select(0))
    assert list(embeds_in(responses)) == [2, 0]
    assert stack.preprocessing.selected == [2, 0]


async def test_all_are_those_that_were_not_selected_before(stack: Stack) -> None:
    responses = await encode(stack, first_request([VIDEO] * 3), select(1), SELECT_ALL)
    assert list(embeds_in(responses)) == [1, 0, 2]


async def test_nothing_is_selected_by_half_closing(stack: Stack) -> None:
    responses = await encode(stack, first_request([VIDEO]))
    assert [response.WhichOneof("response") for response in responses] == ["plan"]
    assert stack.preprocessing.selected == []


async def test_a_prompt_without_media_has_a_plan_and_nothing_else(stack: Stack) -> None:
    responses = await encode(stack, first_request([]), SELECT_ALL)
    assert [response.WhichOneof("response") for response in responses] == ["plan"]


async def test_progress_never_falls_and_is_complete_before_the_embeddings(stack: Stack) -> None:
    responses = await encode(stack, first_request([VIDEO, VIDEO]), SELECT_ALL)
    counts: dict[int, tuple[int, int]] = {}
    for response in responses:
        if response.HasField("progress"):
            progress = response.progress
            now = (progress.decoded_slices, progress.encoded_slices)
            before = counts.get(progress.media_index, (0, 0))
            assert before != now
            assert before[0] <= now[0] <= GRID.t
            assert before[1] <= now[1] <= now[0]
            counts[progress.media_index] = now
        if response.HasField("embeds"):
            assert counts[response.embeds.media_index] == (GRID.t, GRID.t)


async def test_large_arrays_come_and_go_in_pieces(stack: Stack) -> None:
    large = Media(Modality.VIDEO, Grid(17, 16, 16))
    expected = tower_embeds(stack.tower, 0, large)
    responses = await encode(stack, first_request([large]), SELECT_ALL)
    sizes = [len(each.embeds.chunk.data) for each in responses if each.HasField("embeds")]
    assert set(sizes[:-1]) == {2**20}
    assert sum(sizes) == expected.nbytes > 2**20
    np.testing.assert_allclose(embeds_in(responses)[0].embeds, expected.numpy(), atol=2e-6)


# --- what is refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("requests", "complaint"),
    [
        ([], "first request .* prompt"),
        ([select(0)], "first request .* prompt"),
        ([first_request([VIDEO]), first_request([VIDEO])], "must be a select"),
        ([first_request([VIDEO]), select(1)], "below the plan's 1 media, got 1"),
        ([first_request([VIDEO]), select(-1)], "got -1"),
        ([first_request([VIDEO]), select(0), select(0)], "0 was selected before"),
        ([first_request([VIDEO], 1.0)], r"pruning\.rate .* got 1\.0"),
        ([first_request([VIDEO], own={0: prompt_pb2.Pruning(method="best")})], "'best' does not exist"),
    ],
)
async def test_a_wrong_request_is_refused_by_name(stack: Stack, requests: list[EncodeRequest], complaint: str) -> None:
    with pytest.raises(errors.InvalidRequest, match=complaint):
        await encode(stack, *requests)
    await check_served(stack)


ITEM_METHOD = r"^prompt\.messages\[0\]\.parts\[1\]\.video\.pruning\.method "


@pytest.mark.parametrize(
    ("request_", "complaint"),
    [
        (
            first_request([VIDEO], 0.5, "vidcom2"),
            r"^pruning\.method 'vidcom2' .* this model, the methods are evs, none$",
        ),
        (first_request([VIDEO], 0.5, "best"), r"^pruning\.method 'best' .* the methods are evs, none$"),
        (first_request([IMAGE], method="random"), r"^pruning\.method 'random' "),
        (
            first_request([IMAGE, VIDEO], own={1: prompt_pb2.Pruning(method="random")}),
            f"{ITEM_METHOD}'random' .* evs, none$",
        ),
    ],
)
async def test_a_method_that_the_model_does_not_have_is_refused_before_preprocessing_is_asked(
    tmp_path: Path, tower: Tower, request_: EncodeRequest, complaint: str
) -> None:
    async with running(tmp_path, replace(tower, pruning_methods=("evs", "none"))) as stack:
        with pytest.raises(errors.InvalidRequest, match=complaint):
            await encode(stack, request_, SELECT_ALL)
        assert stack.preprocessing.prompts == []
        await check_served(stack)


async def test_a_model_without_evs_serves_requests_that_prune_nothing(tmp_path: Path, tower: Tower) -> None:
    async with running(tmp_path, replace(tower, pruning_methods=("random",))) as stack:
        await check_served(stack)
        with pytest.raises(errors.InvalidRequest, match=r"^pruning\.method 'evs' .* the methods are random$"):
            await encode(stack, first_request([VIDEO], 0.5), SELECT_ALL)
