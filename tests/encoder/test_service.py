"""The encoder over a real socket: what it answers, whole and in parts, and which requests it refuses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gridsieve.common.contract import errors
from gridsieve.common.contract.plan import Grid, Modality
from gridsieve.common.contract.retention import ItemPruning
from gridsieve.common.contract.wire import int32_array
from gridsieve.services.encoder.items import item as items
from gridsieve.services.encoder.pruning.methods import keep_tokens
from gridsieve.services.encoder.tower.tower import Tower
from gridsieve.v1 import prompt_pb2
from gridsieve.v1.encoder_pb2 import EmbedsChunk, EncodeRequest, EncodeResponse, StageAges
from gridsieve.v1.preprocessing_pb2 import PreprocessResponse
from tests.common.loopback import TIMEOUT_S
from tests.encoder.encoder_peers import GRID, IMAGE, VIDEO, WIRE_DTYPES, Media, brought, video
from tests.encoder.encoder_service import (
    SELECT_ALL,
    Stack,
    embeds_in,
    first_request,
    read_all,
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


# --- ages: how long ago an item left each stage, here and in preprocessing ------------------------------------------


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


# --- parts: as slices are encoded, if the caller takes them and no later slice changes a choice ---------------------

IN_PARTS = EncodeRequest(select=prompt_pb2.Select(all=True, parts=True))
SLICE = GRID.slice_tokens


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(items, "_PART_TOKENS", 1)


def asked(stack: Stack, *media: Media, rate: float = 0.0, method: str = "") -> Any:
    return stack.stub.Encode(iter([first_request(media, rate, method), IN_PARTS]), timeout=TIMEOUT_S)


async def parts_until_stalled(stack: Stack, call: Any) -> list[EmbedsChunk]:
    """What a call sends before preprocessing, which has sent one slice, goes on; then the rest of it."""
    parts = []
    async for response in call:
        if response.HasField("embeds"):
            parts.append(response.embeds)
            stack.preprocessing.resumed.set()
    return parts


def joined(parts: Sequence[EmbedsChunk], levels: int) -> tuple[list[int], np.ndarray[Any, Any]]:
    """Kept tokens and embeddings of parts, each of one piece; all parts but the last say how many slices they have."""
    kept, embeds, start = list[int](), [], 0
    for part in parts:
        end = start + part.slices if part.HasField("slices") else GRID.t
        tokens = int32_array(part.kept).tolist() if part.HasField("kept") else list(range(start * SLICE, end * SLICE))
        kept += tokens
        embeds.append(np.frombuffer(part.chunk.data, np.float32).reshape(levels, len(tokens), -1))
        assert (part.HasField("ages"), bool(part.encoding)) == (part is parts[-1], part is parts[0])
        start = end
    assert start == GRID.t
    return kept, np.concatenate(embeds, axis=1)


@pytest.mark.parametrize(("method", "rate"), [("none", 0.0), ("evs", 0.0), ("evs_causal", 0.5), ("evs_causal", 0.9)])
@pytest.mark.usefixtures("small_parts")
async def test_the_first_slice_is_sent_while_the_next_is_decoded(stack: Stack, method: str, rate: float) -> None:
    stack.preprocessing.stall = True
    parts = await asyncio.wait_for(parts_until_stalled(stack, asked(stack, VIDEO, rate=rate, method=method)), TIMEOUT_S)
    assert parts[0].slices == 1
    kept, embeds = joined(parts, 1 + stack.tower.embed_levels)
    expected = tower_embeds(stack.tower, 0, VIDEO)
    indices = keep_tokens(expected[0], GRID, ItemPruning(rate, method))
    assert kept == indices.tolist()
    np.testing.assert_allclose(embeds, expected[:, indices.long()].numpy(), atol=2e-6)
    assert len({part.encoding for part in parts if part.encoding}) == 1
    await stack.check_idle()


@pytest.mark.parametrize(
    ("media", "method", "rate"),
    [(VIDEO, "evs", 0.5), (VIDEO, "vidcom2", 0.5), (IMAGE, "none", 0.0)],
)
@pytest.mark.usefixtures("small_parts")
async def test_what_later_slices_may_change_is_sent_whole(stack: Stack, media: Media, method: str, rate: float) -> None:
    responses = await read_all(asked(stack, media, rate=rate, method=method))
    [whole] = [each.embeds for each in responses if each.HasField("embeds")]
    assert not whole.HasField("slices")


@pytest.mark.usefixtures("small_parts")
async def test_a_cached_item_and_embeddings_of_a_prompt_are_sent_whole(stack: Stack) -> None:
    embeds = torch.randn(1 + stack.tower.embed_levels, GRID.tokens, stack.tower.embed_dim)
    await read_all(asked(stack, VIDEO))
    for media in (VIDEO, brought(embeds)):
        [whole] = [each.embeds for each in await read_all(asked(stack, media)) if each.HasField("embeds")]
        assert not whole.HasField("slices")
