"""Pictures as frames equal the same frames of a file; frames by number and by index; what is refused."""

from __future__ import annotations

import io
from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from PIL import Image

from gridsieve.services.preprocessing.planner import PlannedPrompt
from gridsieve.services.preprocessing.video.slices import PlannedVideo
from gridsieve.v1 import prompt_pb2
from tests import media
from tests.preprocessing import planning
from tests.preprocessing.preprocessing_media import clip, decoded_in_order, transformers_video_processor
from tests.preprocessing.service import EVERYTHING, asked, frames_of, plan_of, prompt_of, refused, sent, video

NTSC = Fraction(30000, 1001)
IRREGULAR_MS = (0, 40, 90, 400, 410, 1000, 1500, 1501)


def pictures_of(data: bytes) -> tuple[bytes, ...]:
    """The frames of a clip as PNGs."""
    return tuple(png(frame) for frame in decoded_in_order(data))


@cache
def filmed() -> tuple[bytes, tuple[bytes, ...]]:
    """A clip of 40 frames, and these as PNGs."""
    data = clip(40, rate=NTSC)
    return data, pictures_of(data)


def png(pixels: Any, **how: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", **how)
    return file.getvalue()


def pixels_of(made: PlannedPrompt) -> Any:
    return np.concatenate([each.pixels for each in made.media[0].slices()])


def places_of(made: PlannedPrompt) -> tuple[int, ...]:
    (media,) = made.media
    assert isinstance(media, PlannedVideo)
    return tuple(media.places)


@pytest.mark.parametrize(
    "wish",
    [
        {"fps": 3.0, "start_s": 0.5, "end_s": 1.25},
        {"max_frames": 6, "min_frames": 5, "max_pixels": 48 * 48},
        {"num_frames": 4, "start_s": 0.4},
        {"frame_indices": (1, 4, 5, 11, 30)},
    ],
    ids=str,
)
def test_pictures_are_sampled_laid_out_and_resized_like_the_frames_of_a_file(
    family_checkpoint: Path, wish: dict[str, Any]
) -> None:
    data, files = filmed()
    times_s = [float(number / NTSC) for number in range(40)]
    file = planning.planned(family_checkpoint, planning.video(data, **wish))
    made = planning.planned(family_checkpoint, planning.pictures(files, times_s, **wish))
    assert made.plan.input_ids.tolist() == file.plan.input_ids.tolist()
    assert made.plan.positions.tolist() == file.plan.positions.tolist()
    (item,), (expected,) = made.plan.media, file.plan.media
    assert item.grid == expected.grid
    assert item.seconds_per_grid == expected.seconds_per_grid
    assert item.timestamps_s == pytest.approx(expected.timestamps_s, abs=1e-9)
    assert np.array_equal(pixels_of(made), pixels_of(file))


@pytest.mark.parametrize("count", [7, 1])
def test_without_settings_all_pictures_are_used_at_their_times(family_checkpoint: Path, count: int) -> None:
    """The last is repeated to a whole temporal patch. The times begin at 100 s, and their steps vary."""
    times_s = [100 + ms / 1000 for ms in IRREGULAR_MS[:count]]
    data = clip(count)
    made = planning.planned(family_checkpoint, planning.pictures(pictures_of(data), times_s))
    (item,) = made.plan.media
    padded = [*times_s, *times_s[-1:] * (count % 2)]
    assert item.timestamps_s == tuple(padded)
    steps = max(1, count - 1)
    span = Fraction(IRREGULAR_MS[count - 1], 1000) if count > 1 else 1
    assert item.seconds_per_grid == 2 * span / steps
    exactly = planning.planned(family_checkpoint, planning.video(data, frame_indices=tuple(range(count))))
    assert np.array_equal(pixels_of(made), pixels_of(exactly))


@pytest.mark.parametrize(("frames", "count"), [(40, 1), (41, 7), (100, 33)])
def test_num_frames_selects_the_frames_of_transformers(
    family: str, family_checkpoint: Path, frames: int, count: int
) -> None:
    processor = transformers_video_processor(family)
    processor.num_frames = processor.fps = None
    metadata = SimpleNamespace(total_num_frames=frames, fps=30.0)
    if family.startswith("qwen2") and count == 1:  # transformers divides by zero
        expected = [0]
    else:
        expected = processor.sample_frames(metadata, num_frames=count).tolist()
    made = planning.planned(family_checkpoint, planning.video(clip(frames), num_frames=count))
    assert places_of(made) == (*expected, *expected[-1:] * (len(expected) % 2))
    (item,) = made.plan.media
    assert item.seconds_per_grid == Fraction(2 * frames, 30 * len(expected))


@pytest.mark.parametrize("indices", [(39,), (3, 10, 30)])
def test_frame_indices_select_exactly_these_frames(family_checkpoint: Path, indices: tuple[int, ...]) -> None:
    made = planning.planned(family_checkpoint, planning.video(clip(40, rate=10), frame_indices=indices))
    padded = (*indices, *indices[-1:] * (len(indices) % 2))
    (item,) = made.plan.media
    assert places_of(made) == padded
    assert item.timestamps_s == tuple(index / 10 for index in padded)
    mean_step = Fraction(indices[-1] - indices[0], 10 * (len(indices) - 1)) if len(indices) > 1 else Fraction(1, 10)
    assert item.seconds_per_grid == 2 * mean_step


def test_content_hashes_differ_where_pictures_their_bounds_or_times_do(tiny_checkpoint: Path) -> None:
    files, times_s = pictures_of(clip(4)), (0.0, 1.0, 2.0, 3.0)
    hashes = [
        planning.plan_of(tiny_checkpoint, planning.pictures(*look)).media[0].content_hash
        for look in (
            (files, times_s),
            (files[::-1], times_s),
            (files, (0.0, 2.0, 4.0, 6.0)),
            ((*files[:3], files[3] + b"x"), times_s),
            ((*files[:2], files[2] + b"x", files[3]), times_s),
            (files, times_s),
        )
    ]
    assert len(set(hashes[1:])) == len(hashes) - 1
    assert hashes[0] == hashes[-1]


# --- through the service ------------------------------------------------------------------------------------------

service_test = pytest.mark.asyncio(loop_scope="session")


def video_of(pictures: Sequence[bytes], times_s: Sequence[float], **sampling: Any) -> prompt_pb2.Part:
    frames = prompt_pb2.PictureFrames(pictures=pictures, timestamps_s=times_s)
    return video(frames=frames, frame_sampling=prompt_pb2.FrameSampling(**sampling))


@service_test
async def test_pictures_are_turned_upright_one_by_one(stub: Any) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # shown after a quarter turn clockwise
    upright = decoded_in_order(clip(2))
    pictures = [png(upright[0]), png(np.rot90(upright[1]), exif=exif)]
    call = await asked(stub, prompt_of(video_of(pictures, (0, 1)), video_of([png(each) for each in upright], (0, 1))))
    frames, _ = await frames_of(call, await plan_of(call))
    assert np.array_equal(frames[0], frames[1])


FOUR = pictures_of(clip(4))
HALVED = FOUR[1][: len(FOUR[1]) // 2]
FOUR_IN_AN_IMAGE = prompt_pb2.Part(
    image=prompt_pb2.Media(frames=prompt_pb2.PictureFrames(pictures=FOUR, timestamps_s=range(4)))
)
TOO_MANY_LEFT_OUT = prompt_pb2.Part(
    video=prompt_pb2.Media(frames=prompt_pb2.PictureFrames(pictures=FOUR, timestamps_s=range(4), left_out=768))
)
ALL_LEFT_OUT = prompt_pb2.Part(video=prompt_pb2.Media(frames=prompt_pb2.PictureFrames(timestamps_s=(0, 1), left_out=2)))
INVALID = [
    (ALL_LEFT_OUT, "frames.pictures must be 1 to 766 pictures, got 0"),
    (TOO_MANY_LEFT_OUT, "frames.left_out must be from 0 to 767, got 768"),
    (video_of([], []), "frames.pictures must be 1 to 768 pictures, got 0"),
    (video_of([b"x"] * 769, range(769)), "frames.pictures must be at most 768 values, got 769"),
    (video_of([FOUR[0], b""], (0, 1)), "frames.pictures[1] must hold at least 1 byte, got 0"),
    (video_of(FOUR, (0, 1, 2)), "frames.timestamps_s must be as many times as pictures, 4, got 3"),
    (video_of(FOUR, (-1, 1, 2, 3)), "frames.timestamps_s[0] must be from 0 to 604800, got -1.0"),
    (video_of(FOUR, (0, 1, 2, 604801)), "frames.timestamps_s[3] must be from 0 to 604800, got 604801.0"),
    (video_of(FOUR, (0, 2, 2, 3)), "frames.timestamps_s[2] must be at least a microsecond after the time before it"),
    (FOUR_IN_AN_IMAGE, "frames is for videos only"),
    (video_of(FOUR, range(4), start_s=9.0), "frame_sampling.start_s selects nothing: no frame appears between 9 s"),
    (video_of(FOUR, range(4), frame_indices=(0, 4)), "frame_sampling.frame_indices must be below 4, the number"),
    (video_of(FOUR, range(4), num_frames=769), "frame_sampling.num_frames must be between 1 and 768, got 769"),
    (video_of(FOUR, range(4), num_frames=2, fps=1.0), "frame_sampling.num_frames must not be set together with fps"),
    (video_of(FOUR, range(4), frame_indices=(1,), end_s=1.0), "frame_sampling.frame_indices must not be set together"),
    (video_of(FOUR, range(4), frame_indices=(1, 1)), "frame_sampling.frame_indices must be strictly increasing, got 1"),
    (video_of(FOUR, range(4), frame_indices=(-1, 1)), "frame_sampling.frame_indices must be at least 0, got -1"),
    (video_of(FOUR, range(4), frame_indices=range(769)), "frame_sampling.frame_indices must be at most 768 indices"),
]
OTHER_SIZE = video_of([*FOUR[:3], media.picture(56, 70)], range(4))
REFUSED = [
    *((part, "INVALID_REQUEST", named) for part, named in INVALID),
    (OTHER_SIZE, "MEDIA_REJECTED", "frames.pictures[3] has 56×70 pixels, the first picture has 64×48"),
    (video_of([*FOUR[:3], b"junk"], range(4)), "MEDIA_REJECTED", "frames.pictures[3] cannot be read as an image"),
    (video_of([FOUR[0], HALVED, *FOUR[2:]], range(4)), "MEDIA_DAMAGED", "frames.pictures[1] cannot be decoded"),
]


@pytest.mark.parametrize(("part", "reason", "named"), REFUSED, ids=lambda each: each if isinstance(each, str) else "")
@service_test
async def test_what_is_refused_is_named(stub: Any, part: prompt_pb2.Part, reason: str, named: str) -> None:
    call = await sent(stub, prompt_of(part), *[EVERYTHING] * (reason == "MEDIA_DAMAGED"))
    code, found, message = await refused(call)
    assert (code, found) == (grpc.StatusCode.INVALID_ARGUMENT, reason)
    kind = "image" if part is FOUR_IN_AN_IMAGE else "video"
    assert message.startswith(f"prompt.messages[0].parts[0].{kind}.{named}")


def test_by_time_slices_are_placed_by_the_times_of_their_first_frames(tiny_checkpoint: Path) -> None:
    """A session's slices, two at a time, are where they would be all at once. At 2 positions a second."""
    times_s = (0.0, 0.5, 1.02, 1.5, 1.98, 2.4, 7.51, 8.0)
    files = tuple(media.picture(56, 56, seed) for seed in range(8))

    def places(first: int, end: int, **frames: Any) -> list[int]:
        made = planning.planned(tiny_checkpoint, planning.pictures(files[first:end], times_s[first:end], **frames))
        (item,) = made.plan.media
        time = made.plan.positions[0, item.runs[0].offset : item.runs[0].end].reshape(item.grid.t, -1)
        assert (time == time[:, :1]).all()
        return [int(place) for place in time[:, 0] - time[0, 0]]

    assert places(0, 8, by_time=True) == [0, 2, 3, 15]
    assert [places(first, first + 4, by_time=True)[1] for first in (0, 2, 4)] == [2, 1, 12]
    assert places(0, 8) != [0, 2, 3, 15]
