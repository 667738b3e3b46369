"""Slices that come one by one are compared with what was last shown of each place, which the caller brings."""

from __future__ import annotations

from typing import Any

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray

from gridsieve.common.contract.wire import int32_array
from gridsieve.v1 import prompt_pb2
from gridsieve.v1.preprocessing_pb2 import PreprocessRequest
from tests import media
from tests.choice import shown_tokens
from tests.preprocessing.service import asked, plan_of, prompt_of, refused, sent
from tests.preprocessing.test_picture_frames import video_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

SIDE, GRID = 112, (4, 4)
THRESHOLD = 0.1
SIZE = {"max_pixels": SIDE * SIDE}


def scene(name: str, number: int) -> NDArray[np.float64]:
    """Levels of slice `number`, one a second, without noise."""
    picture = np.full((SIDE, SIDE, 3), 16.0)
    match name:
        case "dusk":
            picture[:] = 100 - number
        case "night":  # something grey in another place every second
            x, y = number * 37 % 84, number * 61 % 84
            picture[y : y + 28, x : x + 28] = 40
        case "lasts":  # by less than the threshold, from the third second on
            picture[28:56, 28:56] += 8 * (number > 2)
    return picture


def film(name: str, slices: int, noise: float) -> NDArray[np.uint8]:
    """Two frames a slice, with the noise of a sensor."""
    random = np.random.default_rng(3)
    frames = [scene(name, number // 2) + random.normal(0, noise, (SIDE, SIDE, 3)) for number in range(2 * slices)]
    return np.stack(frames).round().clip(0, 255).astype(np.uint8)


def select(reference: bytes, first_slice: int = 1) -> PreprocessRequest:
    pruning = prompt_pb2.Pruning(rate=0, method="pixel_change", threshold=THRESHOLD)
    chosen = prompt_pb2.Select(all=True, pruning=pruning, first_slice=first_slice, reference=reference)
    return PreprocessRequest(select=chosen)


def two_slices(pictures: list[bytes]) -> prompt_pb2.Part:
    return video_of(pictures, range(4), **SIZE)


def without_before(pictures: list[bytes]) -> prompt_pb2.Part:
    part = two_slices(pictures)
    del part.video.frames.pictures[:2]
    part.video.frames.left_out = 2
    return part


async def shown(stub: Any, pictures: list[bytes]) -> list[list[int]]:
    """The tokens of each slice after the first one, each of which is asked for with the slice before it."""
    kept, reference = [], b""
    for first in range(0, len(pictures) - 2, 2):
        part = without_before(pictures[first : first + 4]) if reference else two_slices(pictures[first : first + 4])
        call = await asked(stub, prompt_of(part), select(reference))
        await plan_of(call)
        pieces = []
        while (response := await call.read()) is not grpc.aio.EOF:
            pieces.append(response.frames)
        assert [len(piece.reference) for piece in pieces] == [0, 98 * 16]
        reference = pieces[-1].reference
        kept.append(int32_array(pieces[-1].kept).tolist())
    return kept


@pytest.mark.parametrize(
    ("name", "slices", "most"), [("dusk", 18, 40), ("night", 10, 2 * 4 * 9), ("lasts", 10, 1), ("still", 10, 0)]
)
async def test_what_differs_from_what_was_last_shown_is_shown_again(
    stub: Any, name: str, slices: int, most: int
) -> None:
    frames = film(name, slices, noise=4)
    kept = await shown(stub, [media.png(frame) for frame in frames])
    assert kept == shown_tokens(frames, GRID, 2, THRESHOLD)
    tokens = sum(map(len, kept))
    assert (tokens > 0) == (most > 0)
    assert tokens <= most


@pytest.mark.parametrize(("first_slice", "size_bytes"), [(1, 98 * 16 - 1), (0, 98 * 16)])
async def test_a_reference_of_another_grid_or_without_a_first_slice_is_refused(
    stub: Any, first_slice: int, size_bytes: int
) -> None:
    pictures = [media.png(frame) for frame in film("still", 2, noise=0)]
    wrong = select(bytes(size_bytes), first_slice)
    code, _, message = await refused(await sent(stub, prompt_of(two_slices(pictures)), wrong))
    assert (code, "select.reference must be" in message) == (grpc.StatusCode.INVALID_ARGUMENT, True)


async def test_pictures_that_are_left_out_cannot_be_seen(stub: Any) -> None:
    part = without_before([media.png(frame) for frame in film("still", 2, noise=0)])
    code, _, message = await refused(await sent(stub, prompt_of(part), select(b"")))
    assert (code, "frames.pictures[0]" in message) == (grpc.StatusCode.INVALID_ARGUMENT, True)
