"""Calls to an encoder that is lost halfway are retried; only the missing items are selected again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import REGISTRY

from gridsieve.common.contract import errors
from gridsieve.common.contract.plan import PromptPlan
from gridsieve.common.contract.wire import plan_messages
from gridsieve.common.retries import COST
from gridsieve.services.generation.request.encoded_media import MediaItem
from gridsieve.services.generation.upstream.arriving_item import Progress
from gridsieve.services.generation.upstream.media import MediaClient
from gridsieve.v1.encoder_pb2 import EncodeRequest, EncodeResponse
from tests.awake import SOON_S, within
from tests.generation import media_client
from tests.generation.generation_peers import (
    Context,
    Encoder,
    embeds_messages,
    eventually,
    part_messages,
    prompt_plan,
)
from tests.generation.media_client import (
    FINGERPRINT,
    IMAGE,
    PLAN,
    VIDEO,
    VIDEO_EMBEDS,
    ask,
    items,
    parted_items,
)

LOST = errors.Unavailable("the encoder is draining", "encoder")
TO_THE_VIDEO = 3  # messages of `items` that hold the video


@dataclass
class Losing(Encoder):
    """Sends the selected items, except that the Nth call is lost after `losses[N]` messages of items.

    answers: whether lost calls send their plan first. plans: of each call, if not always the same. then: items of the
    calls after the first, if they are others.
    idle: if given, a call is lost when it is set, before anything is selected.
    """

    losses: list[int] = field(default_factory=list)
    answers: bool = True
    plans: Sequence[PromptPlan] = ()
    then: Sequence[EncodeResponse] = ()
    idle: asyncio.Event | None = None
    calls: int = 0

    async def Encode(self, requests: AsyncIterator[EncodeRequest], context: Context) -> AsyncIterator[EncodeResponse]:
        loss = self.losses.pop(0) if self.losses else None
        self.calls += 1
        assert (await anext(requests)).HasField("prompt")
        if loss is not None and not self.answers:
            raise LOST
        for message in plan_messages(self.plans[self.calls - 1] if self.plans else self.plan):
            yield EncodeResponse(plan=message)
        if loss is not None and self.idle:
            await self.idle.wait()
            raise LOST
        selected = [request.select.media_index async for request in requests]
        self.selections.append(selected)
        items = self.then if self.then and self.calls > 1 else self.items
        wanted = [each for each in items if each.embeds.media_index in selected and each.HasField("embeds")]
        for message in wanted[:loss]:
            yield message
        if loss is not None:
            raise LOST


@asynccontextmanager
async def client_of(folder: Path, encoder: Encoder) -> AsyncIterator[MediaClient]:
    async with media_client.client_of(folder, encoder) as (client, room):
        yield client
        assert room.held_bytes == 0


def retries() -> float:
    return REGISTRY.get_sample_value("gridsieve_upstream_retries_total", {"stage": "encoder"}) or 0


def check_whole(received: Sequence[Progress | MediaItem]) -> None:
    video, image = (each for each in received if isinstance(each, MediaItem))
    assert (video.media_index, image.media_index) == (0, 1)
    assert np.array_equal(video.embeds.numpy(), VIDEO_EMBEDS)


@pytest.mark.parametrize(
    ("losses", "selections"),
    [
        ([TO_THE_VIDEO - 1], [[0, 1], [0, 1]]),
        ([TO_THE_VIDEO], [[0, 1], [1]]),
        ([0, TO_THE_VIDEO + 1], [[0, 1], [0, 1], [1]]),
    ],
    ids=["within an item", "after an item", "twice"],
)
async def test_only_undelivered_items_are_selected_again(
    tmp_path: Path, losses: list[int], selections: list[list[int]]
) -> None:
    before = retries()
    encoder = Losing(PLAN, items(), losses=list(losses))
    async with client_of(tmp_path, encoder) as client:
        check_whole(await ask(client))
    assert encoder.selections == selections
    assert retries() == before + len(losses)


@pytest.mark.parametrize("again", ["in the same parts", "in one part"])
async def test_parts_that_have_arrived_stay_and_the_other_encoders_later_slices_are_taken(
    tmp_path: Path, again: str
) -> None:
    """Two encoders differ in rounding, and may keep other tokens of a slice: an item of both equals no other one."""
    sent, elsewhere = parted_items(), VIDEO_EMBEDS + 100
    other = embeds_messages(0, elsewhere, [0, 1, 2, 5, 8, 9])
    if again == "in the same parts":
        other = [
            *part_messages(0, elsewhere[:, :4], [0, 1, 2, 5], 1),
            *part_messages(0, elsewhere[:, 4:], [8, 9], None),
        ]
    sent[0].embeds.encoding = other[0].embeds.encoding = bytes(32)
    other += sent[4:]
    encoder = Losing(PLAN, sent, losses=[3], then=other)
    async with client_of(tmp_path, encoder) as client:
        first, whole, _ = (each for each in await ask(client) if isinstance(each, MediaItem))
    assert first.tokens == 6
    assert whole.kept is not None
    assert whole.kept.tolist() == [0, 1, 2, 3, 8, 9]
    assert np.array_equal(whole.embeds[:, :4].numpy(), VIDEO_EMBEDS[:, :4])
    assert np.array_equal(whole.embeds[:, 4:].numpy(), elsewhere[:, 4:])
    assert first.digest != whole.digest


async def test_a_call_is_attempted_at_most_three_times_within_a_second(tmp_path: Path) -> None:
    encoder = Losing(PLAN, items(), losses=[0] * 9)
    async with client_of(tmp_path, encoder) as client:
        with pytest.raises(errors.Unavailable, match="the encoder is draining"):
            await within(SOON_S, ask(client))
        assert encoder.calls == 3


async def test_an_encoder_that_refuses_every_call_is_not_the_only_one_that_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # encoders are chosen by their addresses, which are the same in every run
    refuses, encoder = Losing(PLAN, items(), losses=[0] * 99, answers=False), Losing(PLAN, items())
    async with media_client.client_of(Path(), refuses, another=encoder) as (client, _):
        for number in range(8):
            check_whole(await ask(client, replica=f"replica of film {number}"))
    assert refuses.calls
    assert encoder.calls == 8


async def test_a_retry_with_a_different_plan_is_given_up(tmp_path: Path) -> None:
    moved = prompt_plan(FINGERPRINT, 4, VIDEO, 1, IMAGE, 2)
    encoder = Losing(PLAN, items(), losses=[TO_THE_VIDEO], plans=[PLAN, moved])
    async with client_of(tmp_path, encoder) as client:
        with pytest.raises(errors.Unavailable, match="the encoder is draining"):
            await ask(client)
    assert encoder.selections == [[0, 1], []]


async def test_an_encoder_lost_while_bytes_are_awaited_is_called_again(tmp_path: Path) -> None:
    lost = asyncio.Event()
    encoder = Losing(PLAN, items(), losses=[0], idle=lost)
    async with media_client.client_of(tmp_path, encoder) as (client, room):
        async with room.reserved(1):
            asking = asyncio.create_task(ask(client))
            await eventually(lambda: encoder.calls == 1)
            lost.set()
            await asyncio.sleep(0.1)
        check_whole(await asking)
    assert encoder.selections == [[0, 1]]


async def test_all_calls_share_a_budget_of_retries_that_successes_refill(tmp_path: Path) -> None:
    encoder = Losing(PLAN, items(), losses=[0] * 1000)
    async with client_of(tmp_path, encoder) as client:
        client._encoder_retries.budget = 3 * COST
        for calls in (3, 5, 6):
            with pytest.raises(errors.Unavailable):
                await ask(client)
            assert encoder.calls == calls
        encoder.losses = []
        for _ in range(COST):
            await ask(client)
        encoder.losses = [0]
        check_whole(await ask(client))


async def test_retries_end_at_the_callers_deadline(tmp_path: Path) -> None:
    encoder = Losing(PLAN, items(), losses=[0] * 9)
    async with client_of(tmp_path, encoder) as client:
        with pytest.raises(errors.DeadlinePassed):
            await ask(client, timeout=0.05)
        assert encoder.calls <= 2
