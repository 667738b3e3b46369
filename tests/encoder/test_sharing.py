"""One pass for all who ask for the same media at once: who is told what when it fails, and when callers leave."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from common.contract import errors
from common.contract.plan import Grid
from framesieve.v1.preprocessing_pb2 import PreprocessResponse
from services.encoder.tower.tower import Tower
from tests.common.loopback import TIMEOUT_S
from tests.encoder.encoder_peers import GRID, VIDEO, FakePreprocessing, Media, video
from tests.encoder.encoder_service import (
    SELECT_ALL,
    Stack,
    check_idle,
    check_served,
    embeds_in,
    encode,
    first_request,
    item_bytes,
    kept_bytes,
    metric,
    opened,
    read_all,
    running,
    stalled,
    waiters,
)

# --- one pass for all who ask at once ---------------------------------------------------------------------------


async def test_requests_at_once_share_one_pass_and_are_all_told_how_far_it_is(stack: Stack) -> None:
    shared = metric("cache_lookups_total", outcome="shared")
    first = await stalled(stack, VIDEO)
    others = [asyncio.create_task(encode(stack, first_request([VIDEO]), SELECT_ALL)) for _ in range(3)]
    await waiters(4)
    stack.preprocessing.resumed.set()
    answers = [await read_all(first), *await asyncio.gather(*others)]
    assert all(embeds_in(answer) == embeds_in(answers[0]) for answer in answers)
    for answer in answers:
        told = [(each.progress.decoded_slices, each.progress.encoded_slices) for each in answer]
        assert (GRID.t, GRID.t) in told
    assert stack.preprocessing.selected == [0]
    assert metric("cache_lookups_total", outcome="shared") == shared + 3
    await check_idle(stack)


@pytest.mark.parametrize("timeout_s", [TIMEOUT_S, 2])
async def test_a_pass_goes_on_for_the_others_when_whoever_began_it_leaves(stack: Stack, timeout_s: float) -> None:
    began = await stalled(stack, VIDEO, timeout_s=timeout_s)
    other = asyncio.create_task(encode(stack, first_request([VIDEO], 0.5), SELECT_ALL))
    await waiters(2)
    if timeout_s == TIMEOUT_S:
        began.cancel()
    await waiters(1)
    stack.preprocessing.resumed.set()
    assert embeds_in(await other)[0].shape[1] == GRID.tokens // 2
    assert stack.preprocessing.selected == [0]
    assert not stack.preprocessing.cancelled.is_set()
    await check_served(stack)


async def test_a_pass_ends_with_the_last_who_waits_for_it(stack: Stack) -> None:
    began, other = await stalled(stack, VIDEO, video(5)), opened(stack, VIDEO)
    await waiters(3)
    began.cancel()
    await waiters(1)
    assert not stack.preprocessing.cancelled.is_set()
    other.cancel()
    await asyncio.wait_for(stack.preprocessing.cancelled.wait(), TIMEOUT_S)
    await check_served(stack)


async def test_of_a_stream_whose_caller_left_what_others_wait_for_is_still_decoded(stack: Stack) -> None:
    began = await stalled(stack, video(4), video(5), video(6))
    other = asyncio.create_task(encode(stack, first_request([video(5)]), SELECT_ALL))
    await waiters(4)
    began.cancel()
    await waiters(1)
    stack.preprocessing.resumed.set()
    assert list(embeds_in(await other)) == [0]
    assert stack.preprocessing.selected[:2] == [0, 1]
    assert stack.preprocessing.selected.count(0) == 1
    await check_served(stack)


async def test_whoever_waits_goes_on_when_the_one_before_leaves_without_room(tmp_path: Path, tower: Tower) -> None:
    async with running(tmp_path, tower, room_bytes=2 * item_bytes(tower)) as stack:
        wide = video(1, Grid(8, 2, 3))
        holder = await stalled(stack, video(2))
        # There is output room for what they keep, and none for what they are kept of.
        began = opened(stack, wide, rate=0.75)
        await waiters(2)
        other = asyncio.create_task(encode(stack, first_request([wide], 0.75), SELECT_ALL))
        await waiters(3)
        began.cancel()
        await waiters(2)
        assert stack.encoding_bytes.held_bytes == item_bytes(tower)
        stack.preprocessing.resumed.set()
        assert list(embeds_in(await other)) == [0]
        await read_all(holder)
        await check_idle(stack)


async def test_a_caller_that_reads_nothing_holds_up_nobody_who_shares_its_pass(tmp_path: Path, tower: Tower) -> None:
    async with running(tmp_path, tower, room_bytes=2**28) as stack:
        large = video(3, Grid(64, 8, 8))
        # More than the transport takes in between.
        silent = opened(stack, *[large] * 16)
        assert list(embeds_in(await encode(stack, first_request([large]), SELECT_ALL))) == [0]
        await waiters(0)
        assert stack.output_bytes.held_bytes > item_bytes(tower, large.grid.tokens)
        silent.cancel()
        await check_idle(stack)


# --- a pass that fails ------------------------------------------------------------------------------------------

BAD_MEDIA = [
    errors.InvalidRequest("a value is out of range"),
    errors.MediaRejected("no video"),
    errors.MediaDamaged("9 of 10 frames cannot be decoded"),
    errors.MediaForbidden("outside --media-root"),
]
FAILURES = [
    errors.Unavailable("preprocessing is draining", "preprocessing"),
    errors.DeadlinePassed("too late"),
    errors.Overloaded("no worker is free"),
]


def fail_once(preprocessing: FakePreprocessing, error: Exception) -> None:
    """Ends the pass that is on its way; whoever tries again is served."""

    def mend(messages: list[PreprocessResponse]) -> list[PreprocessResponse]:
        preprocessing.fail = None
        return messages

    preprocessing.fail, preprocessing.bend_frames = error, mend


@pytest.mark.parametrize("error", BAD_MEDIA, ids=repr)
async def test_bad_media_is_told_to_everyone_at_once(stack: Stack, error: errors.FramesieveError) -> None:
    calls = [await stalled(stack, VIDEO), opened(stack, VIDEO), opened(stack, VIDEO)]
    await waiters(3)
    stack.preprocessing.fail = error
    stack.preprocessing.resumed.set()
    for call in calls:
        with pytest.raises(type(error), match=str(error)):
            await read_all(call)
    assert stack.preprocessing.selected == [0]
    await check_served(stack)


@pytest.mark.parametrize("error", FAILURES, ids=repr)
async def test_after_a_failure_upstream_one_of_those_who_wait_tries_again(
    stack: Stack, error: errors.FramesieveError
) -> None:
    began = await stalled(stack, VIDEO)
    others = [asyncio.create_task(encode(stack, first_request([VIDEO]), SELECT_ALL)) for _ in range(3)]
    await waiters(4)
    fail_once(stack.preprocessing, error)
    encoded = metric("batch_tokens_sum")
    stack.preprocessing.resumed.set()
    with pytest.raises(type(error), match=str(error)):
        await read_all(began)
    answers = [embeds_in(await other) for other in others]
    assert answers[0] == answers[1] == answers[2]
    assert stack.preprocessing.selected == [0, 0]
    # The slice that was there before is not encoded a second time.
    assert metric("batch_tokens_sum") - encoded <= GRID.tokens
    await check_served(stack)


async def test_progress_never_falls_when_another_tries_again(stack: Stack) -> None:
    began = await stalled(stack, VIDEO)
    other = asyncio.create_task(encode(stack, first_request([VIDEO]), SELECT_ALL))
    await waiters(2)
    fail_once(stack.preprocessing, FAILURES[0])
    stack.preprocessing.resumed.set()
    with pytest.raises(errors.Unavailable):
        await read_all(began)
    told = [each.progress for each in await other if each.HasField("progress")]
    counts = [(each.decoded_slices, each.encoded_slices) for each in told]
    assert counts == sorted(counts)
    assert counts[-1] == (GRID.t, GRID.t)


async def test_what_is_wrong_with_one_item_is_not_told_to_those_who_wait_for_another(stack: Stack) -> None:
    began = await stalled(stack, video(4), video(5))
    other = asyncio.create_task(encode(stack, first_request([video(5)]), SELECT_ALL))
    await waiters(3)
    stack.preprocessing.fail, stack.preprocessing.failing = BAD_MEDIA[2], frozenset([4])
    stack.preprocessing.resumed.set()
    with pytest.raises(errors.MediaDamaged):
        await read_all(began)
    assert list(embeds_in(await other)) == [0]
    await check_served(stack)


async def test_a_bug_of_the_tower_is_told_to_all_and_kept_from_those_who_ask_later(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        calls = [await stalled(stack, VIDEO), opened(stack, VIDEO)]
        await waiters(2)
        patched.setattr(stack.batcher, "_encode", lambda slices: [][0])
        stack.preprocessing.resumed.set()
        for call in calls:
            with pytest.raises(errors.FramesieveError, match="an internal error in Encode"):
                await read_all(call)
    assert list(embeds_in(await encode(stack, first_request([VIDEO]), SELECT_ALL))) == [0]
    await check_served(stack)


# --- orders, and callers that leave -----------------------------------------------------------------------------


@pytest.mark.parametrize("cache_items", [0, 1, 8])
async def test_the_same_videos_in_opposite_orders_complete_in_room_for_one(
    tmp_path: Path, tower: Tower, cache_items: int
) -> None:
    cache_bytes = cache_items * kept_bytes(tower)
    async with running(tmp_path, tower, room_bytes=item_bytes(tower), cache_bytes=cache_bytes) as stack:
        orders = [[1, 2, 3], [3, 2, 1], [2, 3, 1], [1, 3, 2]] * 2
        requests = [first_request([video(content) for content in order], 0.75) for order in orders]
        answers = await asyncio.gather(*(encode(stack, request, SELECT_ALL) for request in requests))
        assert [list(embeds_in(answer)) for answer in answers] == [[0, 1, 2]] * 8
        await check_idle(stack)


@pytest.mark.parametrize("seed", range(4))
async def test_callers_that_leave_at_any_time_leave_nothing_behind(tmp_path: Path, tower: Tower, seed: int) -> None:
    random = np.random.default_rng(seed)
    limits = {"room_bytes": 2 * item_bytes(tower), "cache_bytes": 2 * kept_bytes(tower)}
    async with running(tmp_path, tower, **limits) as stack:

        async def one(media: list[Media], leaves_after_s: float | None) -> None:
            call = opened(stack, *media, rate=0.5)
            if leaves_after_s is None:
                assert len(embeds_in(await read_all(call))) == len(media)
                return
            await asyncio.sleep(leaves_after_s)
            call.cancel()

        asked = [[video(int(each)) for each in random.integers(0, 5, random.integers(1, 4))] for _ in range(40)]
        leaving = [None if random.random() < 0.5 else float(random.exponential(0.05)) for _ in asked]
        async with asyncio.timeout(TIMEOUT_S):
            await asyncio.gather(*(one(*each) for each in zip(asked, leaving, strict=True)))
        await check_served(stack)
