"""An item is sent in parts, as its slices are encoded: if the caller takes them and no later slice changes a choice."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from gridsieve.common.contract.retention import ItemPruning
from gridsieve.common.contract.wire import int32_array
from gridsieve.services.encoder.items import item as items
from gridsieve.services.encoder.pruning.methods import keep_tokens
from gridsieve.v1 import prompt_pb2
from gridsieve.v1.encoder_pb2 import EmbedsChunk, EncodeRequest
from tests.common.loopback import TIMEOUT_S
from tests.encoder.encoder_peers import GRID, IMAGE, VIDEO, Media, brought
from tests.encoder.encoder_service import Stack, first_request, read_all, tower_embeds

IN_PARTS = EncodeRequest(select=prompt_pb2.Select(all=True, parts=True))
SLICE = GRID.slice_tokens


@pytest.fixture(autouse=True)
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
async def test_what_later_slices_may_change_is_sent_whole(stack: Stack, media: Media, method: str, rate: float) -> None:
    responses = await read_all(asked(stack, media, rate=rate, method=method))
    [whole] = [each.embeds for each in responses if each.HasField("embeds")]
    assert not whole.HasField("slices")


async def test_a_cached_item_and_embeddings_of_a_prompt_are_sent_whole(stack: Stack) -> None:
    embeds = torch.randn(1 + stack.tower.embed_levels, GRID.tokens, stack.tower.embed_dim)
    await read_all(asked(stack, VIDEO))
    for media in (VIDEO, brought(embeds)):
        [whole] = [each.embeds for each in await read_all(asked(stack, media)) if each.HasField("embeds")]
        assert not whole.HasField("slices")
