"""The encoder over a real socket: what it answers, and which requests it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from gridsieve.common.contract import errors
from gridsieve.common.contract.plan import Grid, Modality
from gridsieve.common.contract.retention import ItemPruning
from gridsieve.services.encoder.pruning.methods import keep_tokens
from gridsieve.services.encoder.tower.tower import Tower
from gridsieve.v1 import prompt_pb2
from gridsieve.v1.encoder_pb2 import EncodeRequest
from tests.encoder.encoder_peers import GRID, IMAGE, VIDEO, WIRE_DTYPES, Media
from tests.encoder.encoder_service import (
    SELECT_ALL,
    Stack,
    embeds_in,
    first_request,
    running,
    select,
    tower_embeds,
    tower_of,
)


async def test_the_plan_is_followed_by_the_embeddings_of_every_item(stack: Stack) -> None:
    media = [VIDEO, IMAGE, Media(Modality.VIDEO, Grid(2, 3, 3))]
    responses = await stack.encode(first_request(media), SELECT_ALL)
    assert responses[0].HasField("plan")
    received = embeds_in(responses)
    assert list(received) == [0, 1, 2]
    for index, item in enumerate(media):
        assert received[index].kept is None
        expected = tower_embeds(stack.tower, index, item).numpy()
        np.testing.assert_allclose(received[index].embeds, expected, atol=2e-6)


async def test_all_levels_are_pruned_by_the_tokens_that_level_0_keeps(stack: Stack) -> None:
    received = embeds_in(await stack.encode(first_request([VIDEO, IMAGE], 0.5, "vidcom2"), SELECT_ALL))
    expected = tower_embeds(stack.tower, 0, VIDEO)
    kept = keep_tokens(expected[0], GRID, ItemPruning(0.5, "vidcom2"))
    assert received[0].kept == kept.tolist()
    np.testing.assert_allclose(received[0].embeds, expected[:, kept.long()].numpy(), atol=2e-6)
    assert received[1].kept is None  # images are never pruned
    assert received[1].shape == [1 + stack.tower.embed_levels, 6, stack.tower.embed_dim]


async def test_embeddings_are_sent_in_the_towers_dtype(tmp_path: Path, levels_checkpoint: Path) -> None:
    tower, dtype = tower_of(levels_checkpoint, "bfloat16"), torch.bfloat16
    async with running(tmp_path, tower) as stack:
        responses = await stack.encode(first_request([VIDEO], rate=0.5), SELECT_ALL)
    assert {each.embeds.chunk.dtype for each in responses if each.HasField("embeds")} == {WIRE_DTYPES[dtype]}
    (received,) = embeds_in(responses).values()
    expected = tower_embeds(tower, 0, VIDEO)[:, received.kept]
    found = torch.frombuffer(bytearray(received.data), dtype=dtype).view(received.shape)
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-2)


@pytest.mark.parametrize(
    ("media", "selected", "sent"),
    [
        (4, [select(2), select(0)], [2, 0]),
        (3, [select(1), SELECT_ALL], [1, 0, 2]),  # all others
        (0, [SELECT_ALL], []),
    ],
)
async def test_items_are_decoded_and_sent_in_the_order_of_selection(
    stack: Stack, media: int, selected: list[EncodeRequest], sent: list[int]
) -> None:
    responses = await stack.encode(first_request([VIDEO] * media), *selected)
    assert responses[0].HasField("plan")
    assert list(embeds_in(responses)) == stack.preprocessing.selected == sent


async def test_large_embeddings_are_sent_in_pieces_of_1_mib(stack: Stack) -> None:
    large = Media(Modality.VIDEO, Grid(6, 16, 16))
    responses = await stack.encode(first_request([large]), SELECT_ALL)
    *pieces, last = [each.embeds for each in responses if each.HasField("embeds")]
    assert {len(each.chunk.data) for each in pieces} == {2**20}
    assert len(last.chunk.data) <= 2**20
    assert [each.HasField("ages") for each in (*pieces, last)] == [True] + [False] * len(pieces)
    expected = tower_embeds(stack.tower, 0, large).numpy()
    np.testing.assert_allclose(embeds_in(responses)[0].embeds, expected, atol=2e-6)


@pytest.mark.parametrize(
    ("requests", "complaint"),
    [
        ([], "first request .* prompt"),
        ([select(0)], "first request .* prompt"),
        ([first_request([VIDEO]), first_request([VIDEO])], "must be a select"),
        ([first_request([VIDEO]), select(1)], "below the plan's 1 media, got 1"),
        ([first_request([VIDEO]), select(-1)], "got -1"),
        ([first_request([VIDEO]), select(0), select(0)], "0 was already selected"),
        ([first_request([VIDEO], 1.0)], r"pruning\.rate .* got 1\.0"),
        (
            [first_request([VIDEO]), EncodeRequest(select={"all": True, "pruning": prompt_pb2.Pruning()})],
            r"^select\.pruning is for preprocessing alone",
        ),
    ],
)
async def test_a_wrong_request_is_refused_by_field(stack: Stack, requests: list[EncodeRequest], complaint: str) -> None:
    with pytest.raises(errors.InvalidRequest, match=complaint):
        await stack.encode(*requests)
    await stack.check_served()


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (first_request([IMAGE], 0.5, "random"), r"pruning\.method"),
        (
            first_request([IMAGE, VIDEO], own={1: prompt_pb2.Pruning(rate=0.5, method="random")}),
            r"prompt\.messages\[0\]\.parts\[1\]\.video\.pruning\.method",
        ),
    ],
)
async def test_a_method_that_the_model_does_not_support_is_refused_before_preprocessing_is_called(
    tmp_path: Path, tower: Tower, request_: EncodeRequest, field: str
) -> None:
    few = replace(tower, pruning_methods=("evs", "none"), why_not_all="it has no places")
    async with running(tmp_path, few) as stack:
        with pytest.raises(
            errors.InvalidRequest,
            match=f"^{field} must be one of .*evs, none for this model, got 'random': it has no places$",
        ):
            await stack.encode(request_, SELECT_ALL)
        assert stack.preprocessing.prompts == []
