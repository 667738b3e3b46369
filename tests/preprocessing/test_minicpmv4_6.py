"""MiniCPM-V 4.6 and 4.7 are sampled, sized, expanded and placed as by transformers' processor and model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import MiniCPMV4_7Config
from transformers.models.minicpmv4_7.modeling_minicpmv4_7 import MiniCPMV4_7Model

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import InvalidRequest, StartupError
from gridsieve.common.contract.plan import Grid, Modality, PromptPlan
from gridsieve.services.preprocessing.conversation import MediaRequest
from gridsieve.services.preprocessing.layouts.family import load_family
from gridsieve.services.preprocessing.planner import Planner
from gridsieve.services.preprocessing.prompt.canvas import CanvasSpan, canvas_positions
from tests import media
from tests.families import minicpmv4_6 as oracle
from tests.preprocessing import planning
from tests.preprocessing.planning import ROUNDING

DEEP = pytest.mark.deep
RATE, MOST_FRAMES = 4, 12


@dataclass(frozen=True)
class Picture:
    width: int
    height: int
    modality = Modality.IMAGE

    @property
    def data(self) -> bytes:
        return media.picture(self.width, self.height)


@dataclass(frozen=True)
class Video:
    """A clip at RATE frames a second."""

    frames: int
    width: int = 90
    height: int = 60
    modality = Modality.VIDEO

    @property
    def data(self) -> bytes:
        return media.clip(self.frames, fps=RATE, width=self.width, height=self.height)

    @property
    def shown(self) -> np.ndarray[Any, Any]:
        """As many frames as transformers samples; it looks at their size alone here."""
        indices = oracle.video_indices(self.frames, RATE, MOST_FRAMES)
        return np.zeros((len(indices), 3, self.height, self.width), np.uint8)


Message = tuple[str, Sequence[str | Picture | Video]]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    return cache(lambda name, mode: oracle.write_tiny(tmp_path_factory.mktemp(name), 1, name, mode))


@pytest.fixture(scope="module", params=[("minicpmv4_6", "16x"), pytest.param(("minicpmv4_7", "4x"), marks=DEEP)])
def kind(request: pytest.FixtureRequest) -> tuple[str, str]:
    """The model type, and its downsample_mode."""
    found: tuple[str, str] = request.param
    return found


@pytest.fixture(scope="module")
def folder(kind: tuple[str, str], written: Callable[[str, str], Path]) -> Path:
    return written(*kind)


def asked(part: str | Picture | Video, **wish: Any) -> str | MediaRequest:
    if isinstance(part, str):
        return part
    return planning.image(part.data, **wish) if isinstance(part, Picture) else planning.video(part.data, **wish)


def plan_of(folder: Path, *messages: Message, **wish: Any) -> PromptPlan:
    turns = [(role, [asked(part, **wish) for part in parts]) for role, parts in messages]
    planned = Planner(Checkpoint(folder), None).plan(planning.conversation(*turns))
    planned.files.close()
    return planned.plan


def processed(folder: Path, model_type: str, *messages: Message, **options: Any) -> Any:
    """What transformers' processor of a model type makes of a conversation."""
    made = oracle.processor(folder, model_type)
    spelt = [
        {
            "role": role,
            "content": [
                {"type": "text", "text": part} if isinstance(part, str) else {"type": part.modality.value}
                for part in parts
            ],
        }
        for role, parts in messages
    ]
    text = made.tokenizer.apply_chat_template(spelt, tokenize=False, add_generation_prompt=True)
    parts = [part for _, parts in messages for part in parts]
    images = [oracle.rgb(part.data) for part in parts if isinstance(part, Picture)]
    videos = [part.shown for part in parts if isinstance(part, Video)]
    return made(text=[text], images=images or None, videos=videos or None, **options)


def frame_sizes(plan: PromptPlan) -> list[list[int]]:
    """Rows and columns of patches of every picture."""
    sizes = [item.frames.frame_px(index) for item in plan.media for index in range(item.frames.count)]
    return [[side // oracle.PATCH_PX for side in size] for size in sizes]


# Without slices and with grids of every kind, upright and lying.
PICTURES = [(90, 60), (250, 130)]
DEEP_PICTURES = [(40, 300), (112, 112), (9, 9), (500, 60), (113, 112), (230, 230), (301, 299), (2000, 900), (60, 1900)]


@pytest.mark.parametrize(("width", "height"), [*PICTURES, *(pytest.param(*size, marks=DEEP) for size in DEEP_PICTURES)])
def test_an_image_is_sized_sliced_and_expanded_as_by_the_processor(
    folder: Path, kind: tuple[str, str], width: int, height: int
) -> None:
    shown: Message = ("user", (Picture(40, 30), Picture(width, height), "What?"))
    plan, theirs = plan_of(folder, shown), processed(folder, kind[0], shown)
    assert plan.input_ids.tolist() == theirs["input_ids"][0].tolist()
    assert frame_sizes(plan) == theirs["target_sizes"].tolist()
    assert [item.grid.tokens for item in plan.media] == [sum(run.length for run in item.runs) for item in plan.media]


def test_pixels_of_whole_and_slices_are_those_of_the_processor(folder: Path, kind: tuple[str, str]) -> None:
    # Lying: of upright pictures Pillow resizes columns first, which differs by more levels.
    shown: Message = ("user", (Picture(250, 130), "What?"))
    _, [slices] = planning.sent_of(folder, *map(asked, shown[1]))
    sent = [torch.from_numpy(frame) for [frame] in slices]
    ours, theirs = oracle.packed(sent)[0].numpy(), processed(folder, kind[0], shown)["pixel_values"][0].numpy()
    assert ours.shape == theirs.shape
    assert np.abs(ours - theirs).max() <= (ROUNDING + 0.01) * 2 / 255


VIDEOS = [Video(18), *(pytest.param(each, marks=DEEP) for each in (Video(1), Video(60), Video(21, 300, 100)))]


@pytest.mark.parametrize("video", VIDEOS)
def test_a_video_is_sampled_sized_and_expanded_as_by_the_processor(
    folder: Path, kind: tuple[str, str], video: Video
) -> None:
    shown: Message = ("user", ("so ", video, "What?"))
    plan, theirs = plan_of(folder, shown), processed(folder, kind[0], shown, use_image_id=False)
    (item,) = plan.media
    assert plan.input_ids.tolist() == theirs["input_ids"][0].tolist()
    assert frame_sizes(plan) == theirs["target_sizes_videos"].tolist()
    indices = oracle.video_indices(video.frames, RATE, MOST_FRAMES)
    assert item.timestamps_s == pytest.approx([index / RATE for index in indices])
    assert item.grid.t == len(item.runs) == len(indices)


@pytest.fixture(scope="module")
def family(written: Callable[[str, str], Path]) -> Any:
    return load_family(Checkpoint(written("minicpmv4_6", "16x")))


@given(total=st.integers(1, 2_000), rate=st.fractions(Fraction(1, 3), 60, max_denominator=1001))
@example(total=121, rate=Fraction(10))
@example(total=120, rate=Fraction(10))
def test_frames_are_those_of_the_processor(family: Any, total: int, rate: Fraction) -> None:
    indices = family.sample_indices(total, rate, family.frame_bounds)
    assert list(indices) == oracle.video_indices(total, float(rate), MOST_FRAMES)


@pytest.mark.parametrize(
    ("wish", "places"),
    [
        ({"num_frames": 5}, range(0, 20, 4)),
        ({"min_frames": 10}, range(0, 20, 2)),
        ({"fps": 4, "max_frames": 3}, (0, 9, 19)),  # tenths 0, 99 and 199 of quarters of a second
    ],
)
def test_a_request_chooses_other_frames(
    written: Callable[[str, str], Path], wish: dict[str, Any], places: Sequence[int]
) -> None:
    (item,) = plan_of(written("minicpmv4_6", "16x"), ("user", (Video(20), "What?")), **wish).media
    assert item.timestamps_s == pytest.approx([place / RATE for place in places])


WIDE, TALL, SMALL = Picture(300, 130), Picture(60, 400), Picture(50, 40)
MIXES: dict[str, Sequence[Message]] = {
    "no media": [("user", ("What is it?",))],
    "an image alone": [("user", (SMALL,))],
    "an image with slices": [("user", ("Here: ", WIDE, "What?"))],
    "a video and images, one of them in front": [("user", (TALL, Video(18), SMALL, "and", WIDE, "So?"))],
    "videos, one right behind the other": [("user", (Video(9), Video(5), "Which?"))],
    "newlines behind media": [("user", ("a", WIDE, "\nWhat?", SMALL, "\n\nAnd?", Video(5), "\n", Video(5), "\n"))],
    "media in earlier turns": [
        ("system", ("Be brief.",)),
        ("user", (Video(12), TALL, "What moves?")),
        ("assistant", ("A square.",)),
        ("user", (SMALL, "And here?", Picture(230, 240))),
    ],
}
QUICK = "a video and images, one of them in front"


@pytest.mark.parametrize("mode", ["16x", pytest.param("4x", marks=DEEP)])
@pytest.mark.parametrize("mix", [QUICK, *(pytest.param(mix, marks=DEEP) for mix in MIXES if mix != QUICK)])
def test_tokens_of_4_7_have_the_positions_of_the_model(
    written: Callable[[str, str], Path], mix: str, mode: str
) -> None:
    folder = written("minicpmv4_7", mode)
    plan, theirs = plan_of(folder, *MIXES[mix]), processed(folder, "minicpmv4_7", *MIXES[mix])
    assert plan.input_ids.tolist() == theirs["input_ids"][0].tolist()
    model = MiniCPMV4_7Model.__new__(MiniCPMV4_7Model)
    torch.nn.Module.__init__(model)
    model.config = MiniCPMV4_7Config.from_pretrained(folder)
    names = ("input_ids", "mm_token_type_ids", "target_sizes", "target_sizes_videos")
    positions, _ = model.get_rope_index(**{name: theirs[name] for name in names if name in theirs})
    assert plan.positions.tolist() == positions[:, 0].tolist()


def test_tokens_of_4_6_have_their_own_number_as_position(written: Callable[[str, str], Path]) -> None:
    """As where the text model gets no positions. Videos have no number, as in 4.7."""
    folder = written("minicpmv4_6", "16x")
    plan, theirs = plan_of(folder, *MIXES[QUICK]), processed(folder, "minicpmv4_7", *MIXES[QUICK])
    assert plan.input_ids.tolist() == theirs["input_ids"][0].tolist()
    assert plan.positions.tolist() == [list(range(plan.tokens))] * 3


@given(count=st.integers(1, 40), length=st.integers(1, 300))
@example(count=15, length=118)
def test_a_whole_is_stretched_over_its_canvas_as_torch_rounds(count: int, length: int) -> None:
    expected = torch.linspace(0, length - 1, count).round().int().tolist()
    ids = np.zeros(count + 2, np.int32)
    positions = canvas_positions(ids, [(1, CanvasSpan((count, 1), (length, 1)))], ())
    assert positions[1, 1 : 1 + count].tolist() == expected


def test_fewer_pixels_make_fewer_slices_and_smaller_pictures(folder: Path) -> None:
    whole, few, less = (
        plan_of(folder, ("user", (Picture(300, 300), "What?")), max_pixels=pixels).media[0]
        for pixels in (300 * 300, 112 * 112, 60 * 60)
    )
    assert whole.frames.count > few.frames.count == less.frames.count == 1
    assert math.prod(few.frames.size_px) <= 112 * 112
    assert math.prod(less.frames.size_px) <= 60 * 60


@pytest.mark.parametrize("shown", [SMALL, Video(18)])
def test_embeddings_are_laid_out_as_their_pixels(written: Callable[[str, str], Path], shown: Picture | Video) -> None:
    folder = written("minicpmv4_7", "16x")
    pixels = plan_of(folder, ("user", (shown, "What?")))
    request = planning.embedded(shown.modality, pixels.media[0].grid)
    planned = planning.plan_of(folder, request, "What?")
    assert planned.input_ids.tolist() == pixels.input_ids.tolist()
    assert planned.positions.tolist() == pixels.positions.tolist()


def test_embeddings_of_slices_are_refused(written: Callable[[str, str], Path]) -> None:
    request = planning.embedded(Modality.IMAGE, Grid(1, 1, 12), tile_columns=2)
    with pytest.raises(InvalidRequest, match=r"embeds\.tile_columns must be 0 for this model: .*, got 2"):
        planning.plan_of(written("minicpmv4_6", "16x"), request, "What?")


@pytest.mark.parametrize(
    ("file", "changes", "named"),
    [
        ("config", {"downsample_mode": "8x"}, "downsample_mode '8x' is not supported, only 16x, 4x"),
        ("config", {"merger_times": 2}, "merger_times 2 is not supported, only 1"),
        ("config", {"newline_id": None}, "config.json lacks newline_id"),
        ("preprocessor_config", {"downsample_mode": "4x"}, "image processor's downsample_mode is 4x, only 16x"),
        ("video_preprocessor_config", {"stack_frames": 5}, "video processor's stack_frames is 5, only 1"),
    ],
)
def test_unsupported_settings_refuse_to_start(
    written: Callable[[str, str], Path], tmp_path: Path, file: str, changes: dict[str, Any], named: str
) -> None:
    folder = planning.with_settings(written("minicpmv4_7", "16x"), tmp_path, **{file: changes})
    with pytest.raises(StartupError, match=named):
        load_family(Checkpoint(folder))
