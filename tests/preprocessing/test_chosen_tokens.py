"""Tokens chosen before the tower, over a real socket, compared with a second choice from the whole frames.

The scores are those of the service; the choice and the cut are written again.
"""

from __future__ import annotations

import asyncio
import math
import re
from functools import cache
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray

from gridsieve.common import response_queue
from gridsieve.common.contract.plan import MediaPlan
from gridsieve.common.contract.wire import int32_array
from gridsieve.services.preprocessing.workers import segments
from gridsieve.services.preprocessing.workers.job_queue import JobQueue
from gridsieve.v1 import prompt_pb2
from gridsieve.v1.preprocessing_pb2 import PreprocessRequest
from tests.choice import chosen_tokens
from tests.preprocessing.preprocessing_media import B_FRAMES, clip, without_packets
from tests.preprocessing.service import Service, asked, frames_of, plan_of, prompt_of, refused, sent, video
from tests.preprocessing.test_picture_frames import pictures_of, video_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

MIB = 2**20
SIZE = {"max_pixels": 112 * 112}  # 4 × 4 tokens
MOVING = clip(61, size=(112, 112))


def choosing(rate: float = 0.5, threshold: float | None = None, method: str = "pixel_change") -> PreprocessRequest:
    pruning = prompt_pb2.Pruning(rate=rate, method=method, threshold=threshold)
    return PreprocessRequest(select=prompt_pb2.Select(all=True, pruning=pruning))


async def slices_of(call: Any, item: MediaPlan) -> tuple[list[tuple[list[int], NDArray[np.uint8]]], int]:
    """The tokens and the pixels of each slice, and how many frames were repaired."""
    slices: list[tuple[list[int], bytearray, list[int]]] = []
    repaired = 0
    while (response := await call.read()) is not grpc.aio.EOF:
        piece = response.frames
        repaired += piece.repaired_frames
        if piece.HasField("repeats_frame"):
            slices.append(slices[piece.repeats_frame // item.slice_frames])
            continue
        if piece.chunk.offset_bytes == 0:
            assert piece.first_frame == len(slices) * item.slice_frames
            slices.append((int32_array(piece.kept).tolist(), bytearray(), list(piece.chunk.shape)))
        slices[-1][1].extend(piece.chunk.data)
    return [(kept, np.frombuffer(data, np.uint8).reshape(shape)) for kept, data, shape in slices], repaired


def expected(
    frames: NDArray[np.uint8], item: MediaPlan, rate: float, threshold: float | None
) -> list[tuple[list[int], NDArray[np.uint8]]]:
    """The slices of whole frames with the squares of what is chosen of each."""
    side, step, found = item.frames.size_px[0] // item.grid.h, item.slice_frames, []
    choices = chosen_tokens(frames, (item.grid.h, item.grid.w), step, rate, threshold)
    for number, kept in enumerate(choices):
        now = frames[number * step : (number + 1) * step]
        squares = np.zeros((len(now), len(kept) * side, side, 3), np.uint8)
        for place, token in enumerate(kept):
            y, x = token // item.grid.w * side, token % item.grid.w * side
            squares[:, place * side : (place + 1) * side] = now[:, y : y + side, x : x + side]
        found.append((kept, squares))
    return found


async def check(stub: Any, part: prompt_pb2.Part, rate: float, threshold: float | None = None) -> tuple[int, int]:
    """Compares the slices, and returns how many tokens are kept and how many frames were repaired."""
    call = await asked(stub, prompt_of(part))
    plan = await plan_of(call)
    (item,) = plan.media
    frames = (await frames_of(call, plan))[0][0]
    call = await asked(stub, prompt_of(part), choosing(rate, threshold))
    await plan_of(call)
    slices, repaired = await slices_of(call, item)
    wanted = expected(frames, item, rate, threshold)
    assert [kept for kept, _ in slices] == [kept for kept, _ in wanted]
    for (_, ours), (_, theirs) in zip(slices, wanted, strict=True):
        assert ours.shape == theirs.shape
        assert np.array_equal(ours, theirs)
    return sum(len(kept) for kept, _ in slices), repaired


@pytest.mark.parametrize(("rate", "threshold"), [(0.9, None), (0.5, 0.3), (0.0, 0.9)])
async def test_the_squares_of_the_chosen_tokens_are_sent(stub: Any, rate: float, threshold: float | None) -> None:
    await check(stub, video(MOVING, frame_sampling={"fps": 8.0, **SIZE}), rate, threshold)


async def test_a_still_video_with_a_threshold_is_its_first_slice(stub: Any) -> None:
    still = video_of(pictures_of(MOVING)[:1] * 9, range(9), **SIZE)
    assert await check(stub, still, 0.0, 0.1) == (16, 0)


async def test_pictures_an_odd_last_frame_and_repaired_frames_are_chosen_from_as_others(stub: Any) -> None:
    pictures = video_of(pictures_of(MOVING)[:7], range(7), num_frames=7, **SIZE)
    await check(stub, pictures, 0.5)
    await check(stub, pictures, 0.5, 0.3)
    damaged = without_packets(clip(60, container="matroska", codec="mjpeg", size=(112, 112)), [20])
    assert (await check(stub, video(damaged, frame_sampling={"fps": 15.0, **SIZE}), 0.75))[1] == 1


@pytest.mark.parametrize("held_slices", [pytest.param(0, marks=pytest.mark.deep), 10])
async def test_slices_that_are_not_held_are_decoded_again(service: Service, held_slices: int) -> None:
    seeking = clip(60, 25, "matroska", "mpeg4", {"g": "12", "bf": "2"}, size=(112, 112))
    damaged = without_packets(clip(60, 30, "matroska", options=B_FRAMES, size=(112, 112)), [5, 13, 29])
    async with service.serving(held_bytes=held_slices * 2 * 112 * 112 * 3) as stub:
        await check(stub, video(seeking, frame_sampling={"fps": 25.0, **SIZE}), 0.8)
        await check(stub, video_of(pictures_of(MOVING)[:31], range(31), num_frames=31, **SIZE), 0.7)
        assert (await check(stub, video(damaged, frame_sampling={"fps": 30.0, **SIZE}), 0.9))[1] == 3


@cache
def large() -> prompt_pb2.Part:
    film = clip(64, codec="mpeg4", size=(640, 640))
    return video(film, frame_sampling={"fps": 30.0, "max_pixels": 640 * 640})


async def test_a_large_video_of_which_tokens_are_chosen_is_not_held_whole(service: Service) -> None:
    """Its slices have 75 MiB, of which the service, this process, may hold 8 MiB."""
    async with service.serving(held_bytes=8 * MIB) as stub:
        before, most = shared_bytes(), 0
        call = await asked(stub, prompt_of(large()), choosing(0.9))
        (item,) = (await plan_of(call)).media
        assert 3 * item.frames.count * 640 * 640 == 75 * MIB
        while await call.read() is not grpc.aio.EOF:
            most = max(most, shared_bytes() - before)
    assert 0 < most < 16 * MIB


def shared_bytes() -> int:
    """Memory of this process that it shares with its workers."""
    (line,) = (each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("RssShmem:"))
    return int(line.split()[1]) * 1024


async def test_segments_of_several_workers_are_one_video(stub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first slice of a segment is scored against the last one of the segment before."""
    monkeypatch.setattr(segments, "_MIN_S", 1e-6)
    monkeypatch.setattr(JobQueue, "idle", 2)
    parts: list[int] = []
    ends_of = segments.segment_ends
    monkeypatch.setattr(segments, "segment_ends", lambda *of: parts.append(len((made := ends_of(*of))[0])) or made)
    long = clip(120, 25, "matroska", "mpeg4", {"g": "10", "bf": "0"}, size=(112, 112))
    await check(stub, video(long, frame_sampling={"fps": 25.0, **SIZE}), 0.5)
    assert len(parts) == 2
    assert min(parts) > 1


async def test_a_caller_that_reads_nothing_keeps_no_other_waiting_and_may_go_on(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be an encoder whose tower is slow. What it has asked for fills all the room that there is."""
    monkeypatch.setattr(response_queue, "_UNREAD_S", 0.01)
    async with service.serving(held_bytes=32 * MIB) as stub, asyncio.timeout(60):
        idle = await asked(stub, prompt_of(large()), choosing(0.1))
        (item,) = (await plan_of(idle)).media
        for _ in range(3):
            await check(stub, CLIP, 0.5)
        slices, _ = await slices_of(idle, item)
        assert sum(len(kept) for kept, _ in slices) == math.floor(item.grid.tokens * 0.9)


IMAGE = prompt_pb2.Part(image=prompt_pb2.Media(data=pictures_of(MOVING)[0]))
CLIP = video(MOVING, frame_sampling={"fps": 4.0, **SIZE})


@pytest.mark.parametrize(
    ("part", "selection", "named"),
    [
        (CLIP, choosing(method="evs"), r"^select\.pruning\.method must be one of pixel_change, got 'evs'"),
        (CLIP, choosing(1.0), r"^select\.pruning\.rate must be at least 0 and below 1, got 1.0"),
        (CLIP, choosing(0.5, float("nan")), r"^select\.pruning\.threshold must be at least 0 and below 1, got nan"),
        (IMAGE, choosing(), r"^select\.pruning is for videos, the selected item is an image"),
    ],
)
async def test_a_choice_that_cannot_be_made_is_refused(
    stub: Any, part: prompt_pb2.Part, selection: PreprocessRequest, named: str
) -> None:
    code, reason, message = await refused(await sent(stub, prompt_of(part), selection))
    assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
    assert re.search(named, message), message


@pytest.mark.parametrize("selection", [choosing(0.0), choosing(0.9, method="none"), choosing(0.0, method="evs")])
async def test_a_pruning_that_drops_nothing_selects_whole_frames(stub: Any, selection: PreprocessRequest) -> None:
    for part in (CLIP, IMAGE):
        call = await asked(stub, prompt_of(part), selection)
        plan = await plan_of(call)
        assert not (await call.read()).frames.HasField("kept")
        call.cancel()
        assert plan.media
