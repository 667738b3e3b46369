"""Embeddings kept by content: what a second question costs, who shares a pass, and who is told when it fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from prometheus_client import REGISTRY

from common import errors
from common.channels import error_from_status
from common.checkpoint import Checkpoint
from common.plan import Grid, Modality
from common.retention import Pruning
from framesieve.v1.encoder_pb2 import EncodeRequest, EncodeResponse
from framesieve.v1.preprocessing_pb2 import PreprocessResponse
from services.encoder.families import load_tower
from services.encoder.pruning import keep_tokens
from services.encoder.tower import Tower
from tests.contract.encoder_peers import (
    GRID,
    IMAGE,
    SELECT_ALL,
    TIMEOUT_S,
    VIDEO,
    Media,
    Stack,
    check_idle,
    check_served,
    embeds_in,
    encode,
    first_request,
    running,
)

LOOKUPS = "framesieve_encoder_cache_lookups_total"


@pytest.fixture(scope="module")
def tower(tiny_checkpoint: Path) -> Tower:
    torch.set_num_threads(1)
    return load_tower(Checkpoint(tiny_checkpoint), "auto", torch.device("cpu"))


@pytest.fixture
async def stack(tmp_path: Path, tower: Tower) -> AsyncIterator[Stack]:
    async with running(tmp_path, tower) as stack:
        yield stack


def item_bytes(tower: Tower, tokens: int = GRID.tokens) -> int:
    return (1 + tower.embed_levels) * tokens * tower.embed_dim * 4


def kept_bytes(tower: Tower, tokens: int = GRID.tokens) -> int:
    """With scores: one float32 a token for EVS, two for VidCom2."""
    return item_bytes(tower, tokens) + 12 * tokens


def sample(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0


def video(content: int, grid: Grid = GRID) -> Media:
    return Media(Modality.VIDEO, grid, content=content)


def opened(stack: Stack, *media: Media, rate: float = 0, timeout_s: float = TIMEOUT_S) -> Any:
    """A call that selects everything and that nobody reads yet."""
    return stack.stub.Encode(iter([first_request(media, rate), SELECT_ALL]), timeout=timeout_s)


async def read_all(call: Any) -> list[EncodeResponse]:
    try:
        return [response async for response in call]
    except grpc.aio.AioRpcError as error:
        raise error_from_status(error, "encoder") from error


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.005)


async def waiters(stack: Stack, count: int) -> None:
    """Waits until so many requested items wait for an entry."""
    await until(lambda: sample("framesieve_encoder_cache_waiters") == count)


async def stalled(stack: Stack, *media: Media, timeout_s: float = TIMEOUT_S) -> Any:
    """A call whose first item is being decoded, one slice of it sent."""
    stack.preprocessing.stall = True
    call = opened(stack, *media, timeout_s=timeout_s)
    await asyncio.wait_for(stack.preprocessing.stalled.wait(), TIMEOUT_S)
    stack.preprocessing.stall = False
    return call


# --- a second question ------------------------------------------------------------------------------------------


async def test_a_second_question_decodes_and_encodes_nothing_and_is_answered_to_the_bit(stack: Stack) -> None:
    media = [VIDEO, IMAGE]
    first = embeds_in(await encode(stack, first_request(media, 0.5), SELECT_ALL))
    hits = sample(LOOKUPS, outcome="hit")
    forwards = sample("framesieve_encoder_batch_tokens_count")
    assert embeds_in(await encode(stack, first_request(media, 0.5), SELECT_ALL)) == first
    assert stack.preprocessing.selected == [0, 1]
    assert sample("framesieve_encoder_batch_tokens_count") == forwards
    assert sample(LOOKUPS, outcome="hit") == hits + 2


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
        evictions = sample("framesieve_encoder_cache_evictions_total")
        for content in (1, 2, 1, 3, 1, 2):  # 3 takes the place of 2, and 2 that of 3
            await encode(stack, first_request([video(content)]), SELECT_ALL)
            assert sample("framesieve_encoder_cache_bytes") == stack.cache.held_bytes <= 2 * kept_bytes(tower)
        assert len(stack.preprocessing.selected) == 4
        assert sample("framesieve_encoder_cache_evictions_total") == evictions + 2
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
        await waiters(stack, 2)
        stack.preprocessing.resumed.set()
        first, second = [embeds_in(await read_all(call)) for call in calls]
        assert first == second
        assert stack.preprocessing.selected == [0]
        await encode(stack, first_request([VIDEO]), SELECT_ALL)
        assert stack.preprocessing.selected == [0, 0]
        assert stack.cache.held_bytes == 0


# --- one pass for all who ask at once ---------------------------------------------------------------------------


async def test_requests_at_once_share_one_pass_and_are_all_told_how_far_it_is(stack: Stack) -> None:
    shared = sample(LOOKUPS, outcome="shared")
    first = await stalled(stack, VIDEO)
    others = [asyncio.create_task(encode(stack, first_request([VIDEO]), SELECT_ALL)) for _ in range(3)]
    await waiters(stack, 4)
    stack.preprocessing.resumed.set()
    answers = [await read_all(first), *await asyncio.gather(*others)]
    assert all(embeds_in(answer) == embeds_in(answers[0]) for answer in answers)
    for answer in answers:
        told = [(each.progress.decoded_slices, each.progress.encoded_slices) for each in answer]
        assert (GRID.t, GRID.t) in told
    assert stack.preprocessing.selected == [0]
    assert sample(LOOKUPS, outcome="shared") == shared + 3
    await check_idle(stack)


@pytest.mark.parametrize("timeout_s", [TIMEOUT_S, 0.5])
async def test_a_pass_goes_on_for_the_others_when_whoever_began_it_leaves(stack: Stack, timeout_s: float) -> None:
    began = await stalled(stack, VIDEO, timeout_s=timeout_s)
    other = asyncio.create_task(encode(stack, first_request([VIDEO], 0.5), SELECT_ALL))
    await waiters(stack, 2)
    if timeout_s == TIMEOUT_S:
        began.cancel()
    await waiters(stack, 1)
    stack.preprocessing.resumed.set()
    assert embeds_in(await other)[0].shape[1] == GRID.tokens // 2
    assert stack.preprocessing.selected == [0]
    assert not stack.preprocessing.cancelled.is_set()
    await check_served(stack)


async def test_a_pass_ends_with_the_last_who_waits_for_it(stack: Stack) -> None:
    began, other = await stalled(stack, VIDEO, video(5)), opened(stack, VIDEO)
    await waiters(stack, 3)
    began.cancel()
    await waiters(stack, 1)
    assert not stack.preprocessing.cancelled.is_set()
    other.cancel()
    await asyncio.wait_for(stack.preprocessing.cancelled.wait(), TIMEOUT_S)
    await check_served(stack)


async def test_of_a_stream_whose_caller_left_what_others_wait_for_is_still_decoded(stack: Stack) -> None:
    began = await stalled(stack, video(4), video(5), video(6))
    other = asyncio.create_task(encode(stack, first_request([video(5)]), SELECT_ALL))
    await waiters(stack, 4)
    began.cancel()
    await waiters(stack, 1)
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
        await waiters(stack, 2)
        other = asyncio.create_task(encode(stack, first_request([wide], 0.75), SELECT_ALL))
        await waiters(stack, 3)
        began.cancel()
        await waiters(stack, 2)
        assert stack.room.held_bytes == item_bytes(tower)
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
        await waiters(stack, 0)
        assert stack.outputs.held_bytes > item_bytes(tower, large.grid.tokens)
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


@pytest.mark.parametrize("error", BAD_MEDIA, ids=repr)
async def test_bad_media_is_told_to_everyone_at_once(stack: Stack, error: errors.FramesieveError) -> None:
    calls = [await stalled(stack, VIDEO), opened(stack, VIDEO), opened(stack, VIDEO)]
    await waiters(stack, 3)
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
    await waiters(stack, 4)
    stack.preprocessing.fail = error
    stack.preprocessing.bend_frames = lambda messages: stack.preprocessing.__setattr__("fail", None) or messages
    encoded = sample("framesieve_encoder_batch_tokens_sum")
    stack.preprocessing.resumed.set()
    with pytest.raises(type(error), match=str(error)):
        await read_all(began)
    answers = [embeds_in(await other) for other in others]
    assert answers[0] == answers[1] == answers[2]
    assert stack.preprocessing.selected == [0, 0]
    # The slice that was there before is not encoded a second time.
    assert sample("framesieve_encoder_batch_tokens_sum") - encoded <= GRID.tokens
    await check_served(stack)


async def test_progress_never_falls_when_another_tries_again(stack: Stack) -> None:
    began = await stalled(stack, VIDEO)
    other = asyncio.create_task(encode(stack, first_request([VIDEO]), SELECT_ALL))
    await waiters(stack, 2)
    stack.preprocessing.fail = FAILURES[0]
    stack.preprocessing.bend_frames = lambda messages: stack.preprocessing.__setattr__("fail", None) or messages
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
    await waiters(stack, 3)
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
        await waiters(stack, 2)
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

        async def one(request: EncodeRequest, leaves_after_s: float | None) -> None:
            call = stack.stub.Encode(iter([request, SELECT_ALL]), timeout=TIMEOUT_S)
            if leaves_after_s is None:
                assert len(embeds_in(await read_all(call))) == len(request.prompt.prompt.messages[0].parts) - 1
                return
            await asyncio.sleep(leaves_after_s)
            call.cancel()

        requests = [
            first_request([video(int(content)) for content in random.integers(0, 5, random.integers(1, 4))], 0.5)
            for _ in range(40)
        ]
        leaving = [None if random.random() < 0.5 else float(random.exponential(0.05)) for _ in requests]
        async with asyncio.timeout(TIMEOUT_S):
            await asyncio.gather(*(one(*each) for each in zip(requests, leaving, strict=True)))
        await check_served(stack)
