"""Requests share the encoding of equal media, also when its stream fails and when callers disconnect; byte limits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client import REGISTRY

from gridsieve.common.contract import errors
from gridsieve.common.contract.plan import Grid, Modality
from gridsieve.services.encoder.items import item as items
from gridsieve.services.encoder.items.batcher import Batcher
from gridsieve.services.encoder.tower.tower import Tower
from gridsieve.v1.preprocessing_pb2 import PreprocessResponse
from tests.common.loopback import TIMEOUT_S, eventually
from tests.encoder.encoder_peers import GRID, VIDEO, FakePreprocessing, Media, brought, repeating, video
from tests.encoder.encoder_service import (
    SELECT_ALL,
    Stack,
    embeds_in,
    first_request,
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


# --- byte limits, and memory of the device ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("modality", "grid", "remedy"),
    [
        (
            Modality.VIDEO,
            Grid(5, 2, 3),
            r"lower frame_sampling.fps or frame_sampling.max_frames \(now 10 frames\), or frame_sampling.max_pixels",
        ),
        (Modality.IMAGE, Grid(1, 5, 6), r"lower frame_sampling.max_pixels \(now 160×192 a frame\)"),
        (None, Grid(5, 2, 3), r"send fewer tokens than the 5×2×3 of embeds\.grid"),
    ],
)
async def test_an_item_that_can_never_fit_is_refused_with_the_limit_and_a_remedy(
    tmp_path: Path, tower: Tower, modality: Modality | None, grid: Grid, remedy: str
) -> None:
    shape = (1 + tower.embed_levels, grid.tokens, tower.embed_dim)
    media = Media(modality, grid) if modality else brought(torch.zeros(shape), grid)
    async with running(tmp_path, tower, buffer_bytes=item_bytes(tower)) as stack:
        with pytest.raises(errors.MediaRejected, match=f"media 0 becomes 30 tokens, .* 24 tokens; {remedy}"):
            await stack.encode(first_request([media], 0.75), SELECT_ALL)
        await stack.check_served()


@pytest.mark.parametrize(("owner", "name"), [(torch, "empty"), (Batcher, "_forward"), (items, "keep_tokens")])
async def test_a_full_device_is_answered_with_overloaded(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, owner: object, name: str
) -> None:
    def lack_memory(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("none is left")

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, lack_memory)
        with pytest.raises(errors.Overloaded, match="no memory left"):
            await stack.encode(first_request([VIDEO], 0.5), SELECT_ALL)
    await stack.check_served()


async def test_items_are_encoded_concurrently_if_their_bytes_fit(tmp_path: Path, tower: Tower) -> None:
    async with running(tmp_path, tower, buffer_bytes=2 * item_bytes(tower)) as stack:
        call = await stack.stalled(*[VIDEO] * 3)
        await eventually(lambda: stack.encoding_bytes.held_bytes == stack.encoding_bytes.size_bytes)
        call.cancel()


# --- callers that disconnect at other stages --------------------------------------------------------------------


async def leave(
    stack: Stack, reached: Callable[[], bool], go: Callable[[], None] = lambda: None, media: Media = VIDEO
) -> None:
    """Two callers request the same video, one of them twice; both disconnect once `reached`."""
    calls = [stack.opened(media, rate=0.5), stack.opened(media, media, rate=0.5)]
    await eventually(reached)
    for call in calls:
        call.cancel()
    await eventually(lambda: not REGISTRY.get_sample_value("gridsieve_requests_running", {"method": "Encode"}))
    go()
    await stack.check_idle()
    await stack.check_served()


async def test_callers_leave_while_waiting_for_output_bytes(stack: Stack) -> None:
    await stack.output_bytes.reserve(stack.output_bytes.size_bytes)
    await leave(stack, lambda: len(stack.preprocessing.prompts) == 2, lambda: stack.output_bytes.release(2**24))
    assert stack.preprocessing.selected == [0]  # by check_served


async def test_callers_leave_while_waiting_for_encoding_bytes(stack: Stack) -> None:
    await stack.encoding_bytes.reserve(stack.encoding_bytes.size_bytes)
    # Two or three: the first caller waits for bytes with its first item, and may not have started its second.
    await leave(stack, lambda: stack.in_use()["cache_waiters"] >= 2, lambda: stack.encoding_bytes.release(2**24))
    assert stack.preprocessing.selected == [0]


@pytest.mark.parametrize(("stage", "queued"), [("tower", 1), ("pruning", 0)])
async def test_callers_leave_while_a_thread_works(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, stage: str, queued: int
) -> None:
    owner, name = (stack.batcher, "_encode") if stage == "tower" else (items, "keep_tokens")
    work, begun, go = getattr(owner, name), threading.Event(), threading.Event()

    def held_up(*args: Any) -> Any:
        begun.set()
        assert go.wait(TIMEOUT_S)
        return work(*args)

    monkeypatch.setattr(owner, name, held_up)
    more_than_a_forward = video(1, Grid(16, 2, 3))
    await leave(stack, lambda: begun.is_set() and stack.in_use()["queue_slices"] >= queued, go.set, more_than_a_forward)
