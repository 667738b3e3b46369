"""Nemotron's text, sizes and frames are those of its processors in transformers; frames keep what resampling made."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor
from transformers.video_utils import VideoMetadata, default_sample_indices_fn

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import InvalidRequest
from gridsieve.common.contract.plan import Grid, Modality
from gridsieve.common.contract.retention import ItemPruning
from gridsieve.common.contract.tensors import DType
from gridsieve.common.handover import Receiver
from gridsieve.services.preprocessing.conversation import MediaRequest
from gridsieve.services.preprocessing.layouts.family import load_family
from gridsieve.services.preprocessing.planner import PlannedPrompt, Planner
from gridsieve.services.preprocessing.video.sampling import FrameBounds, FrameSampling
from tests import media
from tests.families import nemotron
from tests.families.nemotron import MERGE, PATCH_PX, TUBELET, Video, picture_grid_of, processed
from tests.media import picture
from tests.preprocessing.planning import ids_of, image, planned, rgb, with_settings
from tests.preprocessing.planning import video as movie
from tests.preprocessing.preprocessing_media import clip, decoded_in_order
from tests.preprocessing.service import Queues, Service, asked, frames_of, plan_of, prompt_of, text, video
from tests.preprocessing.test_pixel_change import chosen_of, clip_of

TOKEN_PX = MERGE * PATCH_PX
ROUNDING = 1e-4  # of normalised values, between sums of float32 in another order
FEW = {"fps": 4.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nemotron")
    nemotron.write(folder, 7)
    return folder


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Any:
    return load_family(Checkpoint(folder))


SIDES = st.integers(1, 4000)
PATCHES = st.integers(4, 14000)


@given(height=SIDES, width=SIDES, least=PATCHES, most=PATCHES)
def test_pictures_have_the_size_that_transformers_gives_them(
    loaded: Any, height: int, width: int, least: int, most: int
) -> None:
    if max(height, width) > 100 * min(height, width) or least > most:
        return
    family = replace(loaded, image_patches=(least, most))
    expected = picture_grid_of(height, width, PATCH_PX, MERGE, least, most)
    laid = family.image(height, width, FrameSampling(), 0, 1)
    assert laid.frames.size_px == tuple(PATCH_PX * side for side in expected)


@given(height=SIDES, width=SIDES, patches=PATCHES, keeps_shape=st.booleans())
def test_frames_have_the_size_that_transformers_gives_them(
    loaded: Any, height: int, width: int, patches: int, keeps_shape: bool
) -> None:
    if max(height, width) > 200 * min(height, width):
        return
    settings = {"video_target_num_patches": patches, "video_maintain_aspect_ratio": keeps_shape}
    columns, rows = nemotron.video_processor(**settings)._compute_target_patches(height, width)
    family = replace(loaded, video_patches=patches, keeps_shape=keeps_shape)
    assert family.video_size(height, width, 2, FrameSampling()) == (PATCH_PX * rows, PATCH_PX * columns)


def test_many_images_have_the_fewest_patches_that_each_may_have(loaded: Any) -> None:
    """The context that images share is then less than these."""
    tight = replace(loaded, model_tokens=8, image_patches=(16, 1000))
    for images, most in ((1, 16), (20, 320)):
        expected = picture_grid_of(2000, 2000, PATCH_PX, MERGE, 16, most)
        size = tight.image(2000, 2000, FrameSampling(), 0, images).frames.size_px
        assert size == tuple(PATCH_PX * side for side in expected)


@given(max_pixels=st.integers(TOKEN_PX**2, 10**6), height=SIDES, width=SIDES)
def test_max_pixels_bounds_pictures_and_frames(loaded: Any, max_pixels: int, height: int, width: int) -> None:
    if max(height, width) > 100 * min(height, width):
        return
    wish = FrameSampling(max_pixels=max_pixels)
    high, wide = loaded.image(height, width, wish, 0, 1).frames.size_px
    assert high * wide <= max_pixels


@given(frames=st.integers(1, 4000), rate=st.sampled_from([Fraction(24000, 1001), Fraction(30)]), fps=st.floats(0.5, 20))
def test_indices_equal_those_of_transformers(loaded: Any, frames: int, rate: Fraction, fps: float) -> None:
    metadata = VideoMetadata(total_num_frames=frames, fps=float(rate))
    expected = default_sample_indices_fn(metadata, fps=fps).tolist()
    assert list(loaded.sample_indices(frames, rate, FrameBounds(fps, 1, 10**6, TUBELET))) == expected


def asking(*media: str) -> str:
    return f"<|im_start|>user\n{''.join(media)}What?<|im_end|>\n<|im_start|>assistant\n"


def pixels_of(made: PlannedPrompt, item: int = 0) -> NDArray[np.float32]:
    """All frames of an item, float32 [F, H, W, 3], or the features of a sound."""
    slices = [each.pixels for each in made.media[item].slices()]
    assert {each.dtype for each in slices} == {np.dtype(np.float32)}
    return np.concatenate(slices)


def check_equal(made: PlannedPrompt, expected: dict[str, Tensor]) -> None:
    """Whether transformers' model gets the same tokens and pixels."""
    frames = {item: pixels_of(made, item).tobytes() for item in range(len(made.media))}
    inputs = nemotron.model_inputs(made.plan, frames)
    for name, values in expected.items():
        torch.testing.assert_close(inputs[name], values, atol=ROUNDING, rtol=0)


@pytest.mark.parametrize(
    ("frames", "rate", "size", "wish"),
    [
        (30, 30, (48, 64), FEW),
        (33, Fraction(30000, 1001), (100, 180), {"fps": 5.0}),  # five frames: the last tubelet has one
        (40, 24, (300, 64), {"num_frames": 7}),
        (20, 25, (96, 96), {"frame_indices": (3, 4, 9)}),  # no frame is resized
        (1, 30, (48, 64), {}),
    ],
)
def test_videos_become_the_tokens_and_pixels_of_transformers(
    folder: Path, frames: int, rate: Fraction | int, size: tuple[int, int], wish: dict[str, Any]
) -> None:
    data = clip(frames, rate, size=size)
    made = planned(folder, movie(data, **wish), "What?")
    (item,) = made.plan.media
    indices = [round(time_s * float(rate)) for time_s in dict.fromkeys(item.timestamps_s)]
    taken = np.stack([decoded_in_order(data)[index] for index in indices])
    inputs = processed(folder, asking("<video>"), videos=[Video(taken, indices, float(rate))])
    check_equal(made, inputs)
    assert item.frames.dtype is DType.FLOAT32
    resized = item.frames.size_px != size
    assert (pixels_of(made).max() > 256) == (resized and frames > 1)


@pytest.mark.parametrize("size", [(64, 64), (40, 30), (300, 200), (31, 157)])
def test_images_become_the_tokens_and_pixels_of_transformers(folder: Path, size: tuple[int, int]) -> None:
    data = picture(*size)
    made = planned(folder, image(data), image(picture(90, 70)), "What?")
    inputs = processed(folder, asking("<image>", "<image>"), images=[rgb(data), rgb(picture(90, 70))])
    check_equal(made, inputs)


def sound(data: bytes, **wish: Any) -> MediaRequest:
    return MediaRequest("audio", Modality.AUDIO, data, FrameSampling(**wish))


@pytest.mark.parametrize("samples", [1000, 19_200, 20_001, 100])  # 19,200: the last token has the masked frame alone
def test_sounds_become_the_tokens_and_features_of_transformers(folder: Path, samples: int) -> None:
    heard, photo = media.chirp(samples / 16_000), picture(64, 64)
    made = planned(folder, sound(media.sound(heard)), "and", image(photo), "What?")
    if samples < 320:  # of which transformers makes no numbers
        heard = np.pad(heard, (0, 320 - samples))
    inputs = processed(folder, asking("<so_embedding>", "and", "<image>"), images=[rgb(photo)], sounds=[heard])
    check_equal(made, inputs)
    assert made.plan.media[0].heard_s == samples / 16_000


def test_a_clip_with_its_sound_is_the_clip_and_then_the_sound(folder: Path) -> None:
    """Both from the first frame that is used."""
    data, chirp, bell = clip(32, 8, size=(64, 64)), media.chirp(3.5), media.chirp(0.7, seed=1)
    spoken = replace(movie(media.with_sound(data, chirp), frame_indices=(4, 8, 12)), hears=True)
    made = planned(folder, spoken, sound(media.sound(bell)), "What?")
    frames = [4, 8, 12]
    shown = np.stack([decoded_in_order(data)[index] for index in frames])
    text = asking("<video><so_embedding>", "<so_embedding>")
    inputs = processed(folder, text, videos=[Video(shown, frames, 8.0)], sounds=[chirp[8000:], bell])
    check_equal(made, inputs)
    assert [each.modality for each in made.plan.media] == [Modality.VIDEO, Modality.AUDIO, Modality.AUDIO]
    assert made.plan.positions.tolist() == [list(range(made.plan.tokens))] * 3


def test_a_sound_longer_than_the_positions_of_the_tower_is_refused_with_the_limit(folder: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"audio lasts 12\.500 s, this model hears at most 11\.99 s"):
        planned(folder, sound(media.sound(media.chirp(12.5))))


def test_a_checkpoint_without_a_sound_tower_hears_nothing(folder: Path, tmp_path: Path) -> None:
    deaf = with_settings(folder, tmp_path, config={"audio_config": None})
    with pytest.raises(InvalidRequest, match="audio is not supported: this model takes images and videos only"):
        planned(deaf, sound(media.sound(media.chirp(1.0))))


def test_where_the_rate_varies_the_text_has_the_time_when_a_frame_is_shown(folder: Path) -> None:
    pts = [0, 40, 80, 500, 540, 1000, 1333, 1400]
    made = planned(folder, movie(clip(8, pts=pts, time_base=Fraction(1, 1000)), frame_indices=(0, 3, 6)), "What?")
    tokens = made.plan.media[0].grid.slice_tokens * "<image>"
    spelt = (
        f"Frame 1 sampled at 0.00 seconds and frame 2 sampled at 0.50 seconds: <img>{tokens}</img>\n"
        f"Frame 3 sampled at 1.33 seconds: <img>{tokens}</img>"
    )
    assert made.plan.input_ids.tolist() == ids_of(folder, f"{spelt}What?")


@pytest_asyncio.fixture(loop_scope="session")
async def stub(folder: Path, tmp_path: Path, queues: Queues) -> AsyncIterator[Any]:
    async with Service(Planner(Checkpoint(folder), None), tmp_path, tmp_path, queues).serving() as made:
        yield made


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("handed_over", [False, True])
async def test_workers_and_messages_carry_frames_unrounded(folder: Path, stub: Any, handed_over: bool) -> None:
    data, photo = clip(30, 30, size=(100, 180)), picture(300, 200)
    receiver, taken = Receiver(), list[int]()

    def take(size_bytes: int) -> NDArray[np.uint8]:
        taken.append(size_bytes)
        return receiver.take(size_bytes)

    request = prompt_of(video(data, frame_sampling=FEW), text("and"), video(photo))
    request.handover = receiver.address if handed_over else b""
    call = await asked(stub, request)
    received, _ = await frames_of(call, await plan_of(call), take)
    receiver.close()
    made = planned(folder, movie(data, **FEW), "and", image(photo))
    for index, frames in received.items():
        assert np.array_equal(frames, pixels_of(made, index))
    assert sum(taken) == (sum(frames.nbytes for frames in received.values()) if handed_over else 0)


def test_a_checkpoint_of_the_code_published_with_it_is_read(folder: Path, tmp_path: Path, loaded: Any) -> None:
    config = {"model_type": "NemotronH_Nano_Omni_Reasoning_V3"}
    assert load_family(Checkpoint(with_settings(folder, tmp_path, config=config))) == loaded


@pytest.mark.parametrize(
    "pruning", [ItemPruning(0.6, "pixel_change"), ItemPruning(method="pixel_change", threshold=0.1)], ids=str
)
def test_tokens_chosen_by_their_pixels_are_those_of_rounded_frames(pruning: ItemPruning) -> None:
    """They are sent unrounded."""
    grid = Grid(6, 2, 2)
    frames = clip_of(grid, TOKEN_PX, seed=5).astype(np.float32)
    frames += np.random.default_rng(2).normal(0, 9, frames.shape).astype(np.float32)
    rounded = np.rint(frames).clip(0, 255).astype(np.uint8)
    found, expected = (chosen_of(each, grid, pruning, held=6, repaired=0) for each in (frames, rounded))
    assert found == expected
