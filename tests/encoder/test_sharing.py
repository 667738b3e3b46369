"""Concurrent requests share the encoding of equal media, also when its stream fails and when callers disconnect."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from gridsieve.common.contract import errors
from gridsieve.common.contract.plan import Grid
from gridsieve.services.encoder.tower.tower import Tower
from gridsieve.v1.preprocessing_pb2 import PreprocessResponse
from tests.common.loopback import TIMEOUT_S
from tests.encoder.encoder_peers import GRID, VIDEO, FakePreprocessing, repeating, video
from tests.encoder.encoder_service import (
    Stack,
    embeds_in,
    item_bytes,
    kept_bytes,
    metric,
    read_all,
    running,
    tower_embeds,
    waiters,
)

# --- sharing ----------------------------------------------------------------------------------------------------


async def test_concurrent_requests_share_one_encoding_and_all_get_its_progress(stack: Stack) -> None:
    shared = metric("cache_lookups_total", outcome="shared")
    calls = [await stack.stalled(VIDEO), *(stack.opened(VIDEO) for _ in range(3))]
    await waiters(4)
    stack.preprocessing.resumed.set()
    answers = [await read_all(call) for call in calls]
    assert all(embeds_in(answer) == embeds_in(answers[0]) for answer in answers)
    for answer in answers:
        told = [(each.progress.decoded_slices, each.progress.encoded_slices) for each in answer]
        assert (GRID.t, GRID.t) in told
    assert stack.preprocessing.selected == [0]
    assert metric("cache_lookups_total", outcome="shared") == shared + 3
    await stack.check_idle()


@pytest.mark.parametrize("timeout_s", [TIMEOUT_S, 0.5])
async def test_an_encoding_continues_when_its_first_caller_leaves(stack: Stack, timeout_s: float) -> None:
    began = await stack.stalled(VIDEO, timeout_s=timeout_s)
    other = stack.opened(VIDEO, rate=0.5)
    await waiters(2)
    if timeout_s == TIMEOUT_S:
        began.cancel()
    await waiters(1)
    stack.preprocessing.resumed.set()
    assert embeds_in(await read_all(other))[0].shape[1] == GRID.tokens // 2
    assert stack.preprocessing.selected == [0]
    assert not stack.preprocessing.cancelled.is_set()
    await stack.check_served()


async def test_a_stream_without_its_caller_delivers_only_to_other_waiters_and_then_ends(stack: Stack) -> None:
    began, other = await stack.stalled(video(4), video(5), video(6)), stack.opened(video(5))
    await waiters(4)
    began.cancel()
    await waiters(1)
    stack.preprocessing.resumed.set()
    assert list(embeds_in(await read_all(other))) == [0]
    assert stack.preprocessing.selected[:2] == [0, 1]
    assert stack.preprocessing.selected.count(0) == 1
    await stack.check_served()


async def test_a_stream_is_cancelled_with_the_last_waiter(stack: Stack) -> None:
    began, other = await stack.stalled(VIDEO, video(5)), stack.opened(VIDEO)
    await waiters(3)
    began.cancel()
    await waiters(1)
    assert not stack.preprocessing.cancelled.is_set()
    other.cancel()
    await asyncio.wait_for(stack.preprocessing.cancelled.wait(), TIMEOUT_S)
    await stack.check_served()


async def test_a_waiter_leads_when_the_leader_leaves_while_waiting_for_bytes(tmp_path: Path, tower: Tower) -> None:
    async with running(tmp_path, tower, buffer_bytes=2 * item_bytes(tower)) as stack:
        wide = video(1, Grid(8, 2, 3))
        holder = await stack.stalled(video(2))
        # Their output bytes fit, their encoding bytes do not.
        began = stack.opened(wide, rate=0.75)
        await waiters(2)
        other = stack.opened(wide, rate=0.75)
        await waiters(3)
        began.cancel()
        await waiters(2)
        stack.preprocessing.resumed.set()
        assert list(embeds_in(await read_all(other))) == [0]
        await read_all(holder)
        await stack.check_idle()


async def test_a_caller_that_reads_nothing_does_not_delay_other_waiters(tmp_path: Path, tower: Tower) -> None:
    async with running(tmp_path, tower, buffer_bytes=2**28) as stack:
        large = video(3, Grid(64, 8, 8))
        silent = stack.opened(*[large] * 16)  # more than gRPC buffers
        assert list(embeds_in(await read_all(stack.opened(large)))) == [0]
        await waiters(0)
        assert stack.output_bytes.held_bytes > item_bytes(tower, large.grid.tokens)
        silent.cancel()
        await stack.check_idle()


# --- failures ---------------------------------------------------------------------------------------------------

BAD_MEDIA = errors.MediaDamaged("9 of 10 frames cannot be decoded")


def fail_once(preprocessing: FakePreprocessing, error: Exception) -> None:
    """Fails the running stream; the next one is served."""

    def mend(messages: list[PreprocessResponse]) -> list[PreprocessResponse]:
        preprocessing.fail = None
        return messages

    preprocessing.fail, preprocessing.bend_frames = error, mend


async def test_an_error_of_the_media_fails_all_waiters_without_a_retry(stack: Stack) -> None:
    calls = [await stack.stalled(VIDEO), stack.opened(VIDEO), stack.opened(VIDEO)]
    await waiters(3)
    stack.preprocessing.fail = BAD_MEDIA
    stack.preprocessing.resumed.set()
    for call in calls:
        with pytest.raises(errors.MediaDamaged, match=str(BAD_MEDIA)):
            await read_all(call)
    assert stack.preprocessing.selected == [0]
    await stack.check_served()


@pytest.mark.parametrize(
    "error",
    [
        errors.Unavailable("preprocessing is draining", "preprocessing"),
        errors.DeadlinePassed("too late"),
        errors.Overloaded("no worker is free"),
    ],
    ids=repr,
)
async def test_after_an_error_of_the_stream_a_waiter_resumes_from_its_own(
    stack: Stack, error: errors.GridsieveError
) -> None:
    began = await stack.stalled(VIDEO)
    others = [stack.opened(VIDEO) for _ in range(3)]
    await waiters(4)
    fail_once(stack.preprocessing, error)
    encoded = metric("batch_tokens_sum")
    stack.preprocessing.resumed.set()
    with pytest.raises(type(error), match=str(error)):
        await read_all(began)
    responses = [await read_all(other) for other in others]
    assert embeds_in(responses[0]) == embeds_in(responses[1]) == embeds_in(responses[2])
    told = [each.progress for each in responses[0] if each.HasField("progress")]
    counts = [(each.decoded_slices, each.encoded_slices) for each in told]
    assert counts == sorted(counts)  # progress never decreases
    assert stack.preprocessing.selected == [0, 0]
    assert metric("batch_tokens_sum") - encoded <= GRID.tokens  # the first slice is not encoded again
    await stack.check_served()


async def test_slices_that_repeat_those_of_a_stream_that_failed_are_copied(stack: Stack) -> None:
    """The first stream ends after slice 0; of the second, slices 1 and 3 repeat 0 and 2."""

    def bend(messages: list[PreprocessResponse]) -> list[PreprocessResponse]:
        stack.preprocessing.fail = None
        return [messages[0], repeating(0, 2, 0), messages[2], repeating(0, 6, 4)]

    stack.preprocessing.bend_frames = bend
    began, other = await stack.stalled(VIDEO), stack.opened(VIDEO)
    await waiters(2)
    stack.preprocessing.fail = errors.Unavailable("preprocessing is draining", "preprocessing")
    stack.preprocessing.resumed.set()
    with pytest.raises(errors.Unavailable):
        await read_all(began)
    found = embeds_in(await read_all(other))[0].embeds
    slices = tower_embeds(stack.tower, 0, VIDEO).unflatten(1, (GRID.t, -1))
    np.testing.assert_allclose(found, slices[:, [0, 0, 2, 2]].flatten(1, 2), atol=1e-5)
    assert stack.preprocessing.selected == [0, 0]
    await stack.check_served()


async def test_an_error_of_one_item_does_not_fail_waiters_of_the_next(stack: Stack) -> None:
    began, other = await stack.stalled(video(4), video(5)), stack.opened(video(5))
    await waiters(3)
    stack.preprocessing.fail, stack.preprocessing.failing = BAD_MEDIA, frozenset([4])
    stack.preprocessing.resumed.set()
    with pytest.raises(errors.MediaDamaged):
        await read_all(began)
    assert list(embeds_in(await read_all(other))) == [0]
    await stack.check_served()


async def test_a_tower_that_ends_fails_all_waiters(stack: Stack) -> None:
    calls = [await stack.stalled(VIDEO), stack.opened(VIDEO)]
    await waiters(2)
    stack.batcher.abort(errors.Unavailable("the tower of the encoder has ended", "encoder"))
    stack.preprocessing.resumed.set()
    for call in calls:
        with pytest.raises(errors.Unavailable, match="the tower of the encoder has ended"):
            await read_all(call)
    await stack.check_idle()


# --- no deadlocks, nothing left behind --------------------------------------------------------------------------


@pytest.mark.parametrize("cache_items", [0, 1])
async def test_the_same_videos_in_opposite_orders_complete_with_bytes_for_one(
    tmp_path: Path, tower: Tower, cache_items: int
) -> None:
    limits = {"buffer_bytes": item_bytes(tower), "cache_bytes": cache_items * kept_bytes(tower)}
    async with running(tmp_path, tower, **limits) as stack:
        reserved: set[int] = set()
        stack.preprocessing.on_select = lambda: reserved.add(stack.encoding_bytes.held_bytes)
        orders = [[1, 2, 3], [3, 2, 1], [2, 3, 1], [1, 3, 2]] * 2
        calls = [stack.opened(*map(video, order), rate=0.75) for order in orders]
        assert [list(embeds_in(await read_all(call))) for call in calls] == [[0, 1, 2]] * 8
        assert reserved == {item_bytes(tower)}  # each item has its bytes before it is selected
        await stack.check_idle()
