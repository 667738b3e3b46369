"""Frames that are chosen by keyframes and shots, as if the caller had named them; what modes refuse."""

from __future__ import annotations

import io
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from numpy.typing import NDArray

from gridsieve.common.contract.errors import InvalidRequest
from gridsieve.services.preprocessing.sources.source import bytes_source
from gridsieve.services.preprocessing.video.decode import decode_frames
from gridsieve.services.preprocessing.video.packets import read_packets
from gridsieve.services.preprocessing.video.slices import PlannedVideo
from gridsieve.v1 import prompt_pb2
from tests.preprocessing import planning
from tests.preprocessing.preprocessing_media import B_FRAMES, clip
from tests.preprocessing.service import asked, frames_of, plan_of, prompt_of, video
from tests.preprocessing.test_picture_frames import pictures_of

UNEVEN_MS = tuple(40 * number + 900 * (number // 7) for number in range(60))
CLIPS = {
    "B-frames": clip(60, options=B_FRAMES),
    "a varying rate": clip(60, options=B_FRAMES, pts=UNEVEN_MS, time_base=Fraction(1, 1000)),
    "VP9": clip(60, container="webm", codec="libvpx-vp9", options={"g": "12", "deadline": "realtime"}),
}
RATE, SHOT_FRAMES, GROUP = 25, (0, 40, 65, 130), 50
SHOT_COLOURS = ((200, 40, 40), (30, 60, 200), (230, 230, 60), (20, 120, 40))


def keyframes_of(data: bytes) -> list[int]:
    """Their numbers, by a decoder."""
    with av.open(io.BytesIO(data), "r") as container:
        return [number for number, frame in enumerate(container.decode(video=0)) if frame.key_frame]


def distinct(made: planning.PlannedPrompt) -> list[int]:
    (media,) = made.media
    assert isinstance(media, PlannedVideo)
    return sorted(set(media.places))


@pytest.mark.parametrize("name", CLIPS)
def test_keyframes_are_laid_out_and_decoded_as_if_the_request_named_them(family_checkpoint: Path, name: str) -> None:
    keyframes = keyframes_of(CLIPS[name])
    assert len(keyframes) >= 5
    plan, frames = planning.sent_of(family_checkpoint, planning.video(CLIPS[name], mode="keyframes", num_frames=60))
    expected, named = planning.sent_of(family_checkpoint, planning.video(CLIPS[name], frame_indices=tuple(keyframes)))
    assert plan.input_ids.tolist() == expected.input_ids.tolist()
    assert plan.positions.tolist() == expected.positions.tolist()
    (item,), (other,) = plan.media, expected.media
    assert (item.timestamps_s, item.seconds_per_grid) == (other.timestamps_s, other.seconds_per_grid)
    assert item.content_hash == other.content_hash  # so that caches know them
    assert (item.sampling_mode, item.sampled_frames, other.sampling_mode) == ("keyframes", len(keyframes), "")
    assert all(map(np.array_equal, frames[0], named[0]))


@pytest.mark.parametrize(
    ("wish", "expected"),
    [
        ({"num_frames": 4}, [0, 24, 48, 72]),
        ({"max_frames": 4, "min_frames": 2}, [0, 24, 48, 72]),
        ({"min_frames": 90}, list(range(0, 96, 12))),  # no more than there are
        ({"num_frames": 90, "start_s": 0.75, "end_s": 1.6}, [24, 36]),
        ({"num_frames": 2, "start_s": 0.8}, [24, 60]),
    ],
    ids=str,
)
def test_as_many_keyframes_as_would_be_sampled_uniformly_spread_over_the_part(
    tiny_checkpoint: Path, wish: dict[str, Any], expected: list[int]
) -> None:
    """Of 96 frames at 30 a second each twelfth is a keyframe."""
    made = planning.planned(tiny_checkpoint, planning.video(clip(96, options=B_FRAMES), mode="keyframes", **wish))
    assert distinct(made) == expected


def test_where_all_frames_are_keyframes_they_are_those_of_uniform(tiny_checkpoint: Path) -> None:
    data = clip(40, codec="mjpeg", container="mov")
    uniform, keyframes = (
        planning.planned(tiny_checkpoint, planning.video(data, mode=mode)).plan.media[0]
        for mode in ("uniform", "keyframes")
    )
    assert keyframes.content_hash == uniform.content_hash
    assert keyframes.seconds_per_grid == uniform.seconds_per_grid


def test_of_pictures_each_is_a_keyframe(tiny_checkpoint: Path) -> None:
    files = pictures_of(clip(6))
    made = planning.planned(tiny_checkpoint, planning.pictures(files, range(6), mode="keyframes"))
    assert distinct(made) == list(range(6))


@pytest.mark.parametrize("name", CLIPS)
def test_packets_between_keyframes_are_neither_decoded_nor_read_to_the_next(name: str) -> None:
    """Beyond a keyframe's packet one more is read, which shows that the keyframe is whole."""
    source, read = bytes_source("video", CLIPS[name]), 0

    def progress() -> None:
        nonlocal read
        read += 1

    index, keyframes = read_packets(source), keyframes_of(CLIPS[name])
    made = list(decode_frames(source, index, keyframes, progress))
    assert not any(frame.repaired for frame in made)
    assert read <= 2 * len(keyframes)


@pytest.mark.parametrize(
    ("media", "words"),
    [
        (
            planning.video(clip(20, container="avi", codec="mpeg4"), mode="keyframes"),
            "frame_sampling.mode keyframes is not possible: the container does not tell which frames are keyframes",
        ),
        (planning.video(clip(20, container="h264"), mode="shots"), "frame_sampling.mode shots is not possible"),
        (
            planning.video(CLIPS["B-frames"], mode="keyframes", start_s=0.05, end_s=0.3),
            "keyframes selects nothing: no keyframe appears between 0.05 s and 0.3 s",
        ),
        (
            planning.pictures(pictures_of(clip(2)), (0, 1), mode="shots"),
            "mode shots is for video files, not for pictures",
        ),
    ],
)
def test_what_a_mode_cannot_choose_by_is_refused(tiny_checkpoint: Path, media: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as refusal:
        planning.planned(tiny_checkpoint, media)
    assert refusal.value.field == "video.frame_sampling.mode"
    assert "`frame_sampling.mode` to uniform" in (refusal.value.remedy or "")


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({"mode": "all"}, "mode must be uniform, keyframes or shots, got 'all'"),
        ({"mode": "keyframes", "frame_indices": (1,)}, "frame_indices must not be set together with mode"),
    ],
)
def test_a_mode_that_does_not_exist_or_that_says_nothing_is_refused(wish: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        planning.video(b"", **wish)


def film(scenecut: bool) -> bytes:
    """Four shots, each a colour with a bright square that moves. Without scenecut keyframes are two seconds apart."""
    options = {"g": str(GROUP), "bf": "2"} | ({} if scenecut else {"sc_threshold": "0", "keyint_min": str(GROUP)})
    if not scenecut:
        options["x264-params"] = "scenecut=0"
    with io.BytesIO() as file:
        with av.open(file, "w", format="mp4") as container:
            stream = container.add_stream("libx264", rate=RATE, options=options)
            stream.height, stream.width, stream.pix_fmt = 144, 256, "yuv420p"
            for number in range(150):
                picture = scene(sum(number >= first for first in SHOT_FRAMES) - 1, number)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
            container.mux(stream.encode())
        return file.getvalue()


def scene(shot: int, number: int) -> NDArray[np.uint8]:
    random = np.random.default_rng(shot)
    texture = np.kron(random.integers(-40, 40, (18, 32)), np.ones((8, 8), int))[..., None]
    picture = np.clip(np.array(SHOT_COLOURS[shot]) + texture, 0, 255).astype(np.uint8)
    left = number % 100 * 2
    picture[60:80, left : left + 20] = 255
    return picture


@pytest.mark.parametrize("scenecut", [True, False])
def test_shots_begin_where_they_were_cut(tiny_checkpoint: Path, scenecut: bool) -> None:
    """Whether the encoder put keyframes there or not. A B-frame may show the new shot before the packet that tells."""
    places = distinct(planning.planned(tiny_checkpoint, planning.video(film(scenecut), mode="shots", num_frames=4)))
    assert len(places) == 4
    assert all(0 <= place - cut <= 2 for place, cut in zip(places, SHOT_FRAMES, strict=True))


def test_each_shot_is_filled_evenly_until_there_are_as_many_frames_as_would_be_sampled_uniformly(
    tiny_checkpoint: Path,
) -> None:
    """The 150 frames of four shots at 40, 25, 65 and 20: the next frame goes where the steps are longest."""
    made = planning.planned(tiny_checkpoint, planning.video(film(scenecut=True), mode="shots", num_frames=8))
    counts = np.histogram(distinct(made), [*SHOT_FRAMES, 150])[0]
    assert counts.tolist() == shares((40, 25, 65, 20), 8)
    steps = [after - before for before, after in pairwise(distinct(made))]
    assert max(steps) <= 25


def shares(lengths: Sequence[int], frames: int) -> list[int]:
    """Highest averages: one to each, the next to the greatest length for each frame."""
    counts = [1] * len(lengths)
    while sum(counts) < frames:
        steps = [length / count for length, count in zip(lengths, counts, strict=True)]
        counts[steps.index(max(steps))] += 1
    return counts


@pytest.mark.asyncio(loop_scope="session")
async def test_a_worker_finds_the_same_shots_and_the_plan_tells_the_mode(stub: Any, tiny_checkpoint: Path) -> None:
    here = planning.plan_of(tiny_checkpoint, planning.video(film(scenecut=True), mode="shots", num_frames=8))
    wish = prompt_pb2.FrameSampling(mode="shots", num_frames=8)
    call = await asked(stub, prompt_of(video(film(scenecut=True), frame_sampling=wish)))
    plan = await plan_of(call)
    (item,) = plan.media
    frames, repaired = await frames_of(call, plan)
    assert (item.sampling_mode, item.sampled_frames) == ("shots", 8)
    assert item.timestamps_s == here.media[0].timestamps_s
    assert (len(frames[0]), repaired) == (8, 0)
