"""The encoder over a real socket: what it answers, and which requests it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from common.contract import errors
from common.contract.plan import Grid, Modality
from common.contract.retention import Pruning
from framesieve.v1 import prompt_pb2, tensor_pb2
from framesieve.v1.encoder_pb2 import EncodeRequest
from services.encoder.items import item as items
from services.encoder.pruning.methods import keep_tokens
from services.encoder.settings import EncoderSettings
from services.encoder.tower.tower import Tower
from services.encoder.tower.transfers import Readback
from tests.encoder.encoder_peers import GRID, IMAGE, VIDEO, Media, brought
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


# --- what is answered -------------------------------------------------------------------------------------------


async def test_the_plan_is_followed_by_the_embeddings_of_every_item(stack: Stack) -> None:
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
async def test_all_levels_are_pruned_by_the_tokens_that_level_0_keeps(stack: Stack, method: str) -> None:
    received = embeds_in(await encode(stack, first_request([VIDEO, IMAGE], 0.5, method), SELECT_ALL))
    expected = tower_embeds(stack.tower, 0, VIDEO)
    kept = keep_tokens(expected[0], GRID, Pruning(0.5, method))
    assert received[0].kept == kept.tolist()
    np.testing.assert_allclose(received[0].embeds, expected[:, kept.long()].numpy(), atol=2e-6)
    assert received[1].kept is None  # images are never pruned
    assert received[1].shape == [1 + stack.tower.embed_levels, 6, stack.tower.embed_dim]


@pytest.mark.parametrize(("dtype", "on_the_wire"), HALVES.items(), ids=str)
async def test_embeddings_are_sent_in_the_towers_dtype(
    tmp_path: Path, levels_checkpoint: Path, dtype: torch.dtype, on_the_wire: int
) -> None:
    tower = tower_of(levels_checkpoint, str(dtype).removeprefix("torch."))
    async with running(tmp_path, tower) as stack:
        responses = await encode(stack, first_request([VIDEO], rate=0.5), SELECT_ALL)
    sent = next(each.embeds.chunk for each in responses if each.HasField("embeds"))
    (received,) = embeds_in(responses).values()
    assert sent.dtype == on_the_wire
    expected = tower_embeds(tower, 0, VIDEO)[:, received.kept]
    found = torch.frombuffer(bytearray(received.data), dtype=dtype).view(received.shape)
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-2)


async def test_only_kept_rows_and_their_indices_leave_the_device(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pruned and read back with the device of the embeddings as current: that of a new thread is cuda:0."""
    current: list[Tensor] = []
    read: list[tuple[torch.Size, ...]] = []

    @contextmanager
    def device_of(tensor: Tensor) -> Iterator[None]:
        current.append(tensor)
        yield
        current.pop()

    class Recording(Readback):
        def __init__(self, *tensors: Tensor) -> None:
            read.append(tuple(each.shape for each in tensors))
            super().__init__(*tensors)

        def wait(self) -> list[Tensor]:
            assert current
            return super().wait()

    def keep(*args: Any) -> Tensor:
        assert current
        return keep_tokens(*args)

    embeds = torch.randn(1 + stack.tower.embed_levels, GRID.tokens, stack.tower.embed_dim)
    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(items, "Readback", Recording)
    monkeypatch.setattr(items, "keep_tokens", keep)
    await encode(stack, first_request([brought(embeds)], 0.5), SELECT_ALL)
    assert read == [((len(embeds), 12, stack.tower.embed_dim), (12,))]


async def test_an_items_own_pruning_overrides_the_requests(stack: Stack) -> None:
    own = {1: prompt_pb2.Pruning(rate=0.25), 2: prompt_pb2.Pruning(rate=0.5, method="random", seed=3)}
    own[3] = prompt_pb2.Pruning(rate=0.5, method="none")
    received = embeds_in(await encode(stack, first_request([VIDEO] * 4, 0.75, own=own), SELECT_ALL))
    assert [item.shape[1] for item in received.values()] == [6, 18, 12, 24]
    assert received[2].kept == keep_tokens(torch.empty(24, 1), GRID, Pruning(0.5, "random", 3)).tolist()
    assert received[3].kept is None


@pytest.mark.parametrize(
    ("media", "selected", "sent"),
    [
        (4, [select(2), select(0)], [2, 0]),
        (3, [select(1), SELECT_ALL], [1, 0, 2]),  # all others
        (1, [], []),  # half-closing selects nothing
        (0, [SELECT_ALL], []),
    ],
)
async def test_items_are_decoded_and_sent_in_the_order_of_selection(
    stack: Stack, media: int, selected: list[EncodeRequest], sent: list[int]
) -> None:
    responses = await encode(stack, first_request([VIDEO] * media), *selected)
    assert responses[0].HasField("plan")
    assert list(embeds_in(responses)) == stack.preprocessing.selected == sent


async def test_large_embeddings_are_sent_in_pieces_of_1_mib(stack: Stack) -> None:
    large = Media(Modality.VIDEO, Grid(6, 16, 16))
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
async def test_a_wrong_request_is_refused_by_field(stack: Stack, requests: list[EncodeRequest], complaint: str) -> None:
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
        (first_request([IMAGE], method="random"), r"^pruning\.method 'random' "),
        (
            first_request([IMAGE, VIDEO], own={1: prompt_pb2.Pruning(method="random")}),
            f"{ITEM_METHOD}'random' .* evs, none$",
        ),
    ],
)
async def test_a_method_that_the_model_does_not_support_is_refused_before_preprocessing_is_called(
    tmp_path: Path, tower: Tower, request_: EncodeRequest, complaint: str
) -> None:
    async with running(tmp_path, replace(tower, pruning_methods=("evs", "none"))) as stack:
        with pytest.raises(errors.InvalidRequest, match=complaint):
            await encode(stack, request_, SELECT_ALL)
        assert stack.preprocessing.prompts == []
        await check_served(stack)


# --- the command ------------------------------------------------------------------------------------------------


def test_flags_are_read_and_wrong_values_are_refused_by_flag() -> None:
    settings = EncoderSettings.load(["--listen", "unix:/e", "--preprocessing", "unix:/p", "--cache-bytes", "0"])
    assert (settings.listen, settings.preprocessing, settings.cache_bytes) == ("unix:/e", "unix:/p", 0)
    with pytest.raises(errors.StartupError, match=r"--output-buffer-bytes.*got '0'"):
        EncoderSettings.load(["--output-buffer-bytes", "0"])
