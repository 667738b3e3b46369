"""Byte limits of the encoder, memory of its device, and callers that disconnect at any stage."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY

from gridsieve.common.contract import errors
from gridsieve.common.contract.plan import Grid, Modality
from gridsieve.services.encoder.items import item as items
from gridsieve.services.encoder.items.batcher import Batcher
from gridsieve.services.encoder.tower.tower import Tower
from tests.common.loopback import TIMEOUT_S, eventually
from tests.encoder.encoder_peers import VIDEO, Media, brought, video
from tests.encoder.encoder_service import SELECT_ALL, Stack, first_request, item_bytes, running


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


# --- callers that disconnect: while media is decoded and while answers are sent, see test_sharing.py ------------


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
