"""MiniCPM-V's slices and markers against the published formulas, written a second time from exact arithmetic."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import InvalidRequest
from gridsieve.common.contract.plan import Grid, Modality
from gridsieve.services.preprocessing.layouts.family import load_family
from gridsieve.services.preprocessing.planner import Planner
from gridsieve.services.preprocessing.video.sampling import FrameSampling, FrameTimes, sample
from tests.families import minicpm
from tests.media import clip, picture
from tests.preprocessing.planning import (
    ROUNDING,
    embedded,
    ids_of,
    image,
    pictures,
    plan_of,
    planned,
    rgb,
    sent_of,
    tokenizer_of,
    video,
    with_settings,
)

# Pillow resizes columns before rows where that is less work, which differs by up to 13 levels: not here.
SLICED = (120, 200)
SCALE, PATCH = minicpm.SCALE_PX, minicpm.PATCH_PX


def grids(slices: int) -> Iterator[tuple[int, int]]:
    """Columns and rows of all grids of so many slices, fewer columns first."""
    return ((columns, slices // columns) for columns in range(1, slices + 1) if not slices % columns)


def grid_of(width: int, height: int, most: int = 9) -> tuple[int, int] | None:
    """The grid nearest in shape, of one slice fewer to one more than the pixels need; None without slices."""
    needed = min(-(-width * height // SCALE**2), most)
    if needed <= 1:
        return None
    counts = [count for count in (needed - 1, needed, needed + 1) if 1 < count <= most]
    candidates = [grid for count in counts for grid in grids(count)]
    return min(candidates, key=lambda grid: abs(math.log(width / height) - math.log(grid[0] / grid[1])))


def whole_patches(length: Fraction) -> int:
    return max(PATCH, PATCH * round(length / PATCH))


def sides_of(width: float, height: float, *, grow: bool) -> tuple[int, int]:
    """Width and height in pixels of a picture of this shape, of as many as a slice has if it has more or grows."""
    if grow or width * height > SCALE**2:
        shape = width / height
        height = math.floor(SCALE / shape**0.5)
        width = math.floor(height * shape)
    return whole_patches(Fraction(width)), whole_patches(Fraction(height))


def expected(width: int, height: int, most: int = 9) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    """The source picture's width and height, a slice's, and the grid; (0, 0) without slices."""
    grid = grid_of(width, height, most)
    source = sides_of(width, height, grow=grid is None)
    if grid is None:
        return source, (0, 0), (0, 0)
    columns, rows = grid
    refined = max(columns, columns * round(width / columns)), max(rows, rows * round(height / rows))
    return source, sides_of(refined[0] / columns, refined[1] / rows, grow=True), grid


def markers(grid: tuple[int, int], number: int | None, version: str) -> str:
    """Of the image of this number; None: images have none."""
    unknown = "<unk>" * minicpm.QUERIES[version]
    whole = f"<image>{unknown}</image>"
    if version == "2.5":
        rows = "\n".join([whole * grid[0]] * grid[1])
        return whole + (f"<slice>{rows}</slice>" if grid[1] else "")
    rows = "\n".join([f"<slice>{unknown}</slice>" * grid[0]] * grid[1])
    return ("" if number is None else f"<image_id>{number}</image_id>") + whole + rows


@pytest.fixture(scope="module", params=["2.5", "2.6"])
def version(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def folder(version: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp(f"minicpm{version}")
    minicpm.write(made, 1, version)
    return made


@pytest.fixture(scope="module")
def planner(folder: Path) -> Planner:
    return Planner(Checkpoint(folder), None)


@cache
def planner_with(folder: Path, most: int, sliced: bool, numbered: bool) -> Planner:
    slices = {"max_slice_nums": most, "patch_size": PATCH, "scale_resolution": SCALE}
    files: dict[str, Any] = {"config": {"slice_config": slices}}
    files["preprocessor_config"] = {"slice_mode": sliced, "use_image_id": numbered}
    to = folder.parent / f"{folder.name} {most} {sliced} {numbered}"
    return Planner(Checkpoint(with_settings(folder, to, **files)), None)


@settings(max_examples=30)
@given(
    width=st.integers(4, 700),
    height=st.integers(4, 700),
    most=st.sampled_from([1, 2, 4, 9, 12]),
    sliced=st.sampled_from([True, True, True, False]),
    numbered=st.booleans(),
)
def test_an_image_of_any_size_expands_as_published_with_any_settings(
    folder: Path, version: str, width: int, height: int, most: int, sliced: bool, numbered: bool
) -> None:
    datas = [picture(20, 30, seed=1), picture(width, height)]
    plan = plan_of(planner_with(folder, most, sliced, numbered), *map(image, datas), "What?")
    source, tile, grid = expected(width, height, most if sliced else 1)
    _, item = plan.media
    assert (item.grid.h, item.grid.w) == (1 + grid[0] * grid[1], minicpm.QUERIES[version])
    assert item.frames.size_px[::-1] == source
    assert item.frames.frame_px(1)[::-1] == (tile if grid[0] else source)
    assert (item.frames.count, item.frames.tile_columns) == (1 + grid[0] * grid[1], grid[0])
    shown = (markers(each, number if numbered else None, version) for number, each in enumerate(((0, 0), grid)))
    assert plan.input_ids.tolist() == ids_of(folder, "\n".join([*shown, "What?"]))


@pytest.mark.parametrize("size", [(50, 40), (200, 70), (64, 190)])
def test_embeddings_of_an_image_are_laid_out_as_its_pixels(planner: Planner, size: tuple[int, int]) -> None:
    first = image(picture(40, 30, seed=1))
    of_pixels = plan_of(planner, first, "and", image(picture(*size)), "What?")
    item = of_pixels.media[1]
    of_embeds = plan_of(planner, first, "and", embedded(item.modality, item.grid, item.frames.tile_columns), "What?")
    assert of_embeds.input_ids.tolist() == of_pixels.input_ids.tolist()
    assert of_embeds.media[1].runs == item.runs


@pytest.mark.parametrize(
    ("modality", "rows", "more", "columns", "named"),
    [
        ("image", 1, 1, 0, r"grid\.w must be {queries}, .* got {more}"),
        ("image", 4, 0, 0, r"tile_columns must divide the image's tiles, 3 by embeds\.grid\.h, got 0"),
        ("image", 7, 0, 4, r"tile_columns must divide the image's tiles, 6 by embeds\.grid\.h, got 4"),
        ("image", 7, 0, -1, r"tile_columns must divide the image's tiles, 6 by embeds\.grid\.h, got -1"),
        ("image", 1, 0, 1, r"tile_columns of an image without tiles must be 0, got 1"),
        ("image", 11, 0, 5, r"grid\.h must be at most 10, the source picture and its slices, got 11"),
        ("video", 1, 1, 0, r"grid\.w must be {queries}, .* got {more}"),
        ("video", 2, 0, 0, r"grid\.h of a video must be 1 for this model, got 2"),
        ("video", 1, 0, 2, r"tile_columns is for images, got 2 for a video"),
    ],
)
def test_embeddings_of_another_layout_are_refused_with_their_field(
    planner: Planner, version: str, modality: str, rows: int, more: int, columns: int, named: str
) -> None:
    queries = minicpm.QUERIES[version]
    if (modality, version) == ("video", "2.5"):
        return  # takes images only
    wished = named.format(queries=queries, more=queries + more)
    with pytest.raises(InvalidRequest, match=rf"embeds\.{wished}"):
        plan_of(planner, embedded(Modality(modality), Grid(1, rows, queries + more), columns), "What?")


def test_slices_are_cut_from_the_picture_resized_to_all_of_them(planner: Planner) -> None:
    data = picture(*SLICED)
    _, [slices] = sent_of(planner, image(data), "What?")
    sent = [frame.astype(int) for [frame] in slices]
    source, (width, height), (columns, rows) = expected(*SLICED)
    whole = Image.fromarray(rgb(data))
    small = np.asarray(whole.resize(source, Image.Resampling.BICUBIC), int)
    large = np.asarray(whole.resize((columns * width, rows * height), Image.Resampling.BICUBIC), int)
    assert np.abs(sent[0] - small).max() <= ROUNDING
    for number, frame in enumerate(sent[1:]):
        top, left = number // columns * height, number % columns * width
        assert np.abs(frame - large[top : top + height, left : left + width]).max() <= ROUNDING


def test_fewer_pixels_make_fewer_slices(planner: Planner, version: str) -> None:
    plan = plan_of(planner, image(picture(300, 300), max_pixels=60 * 60), "What?")
    columns, rows = grid_of(60, 60) or (0, 0)
    assert plan.media[0].grid.h == 1 + columns * rows


def test_a_video_is_a_picture_a_second(planner: Planner, folder: Path, version: str) -> None:
    wished = video(clip(30, fps=10, width=90, height=60))
    if version == "2.5":
        with pytest.raises(InvalidRequest, match="video is not supported: this model takes images only"):
            plan_of(planner, wished, "What?")
        return
    plan = plan_of(planner, wished, "What?")
    (item,) = plan.media
    assert item.timestamps_s == pytest.approx((0.0, 1.0, 2.0))
    assert item.frames.size_px[::-1] == sides_of(90, 60, grow=True)
    frame = f"<image>{'<unk>' * minicpm.QUERIES[version]}</image>"
    assert plan.input_ids.tolist() == ids_of(folder, f"{frame}\n" * 3 + "What?")


@pytest.mark.parametrize("size", [(120, 60), (50, 90), (40, 40)])
def test_frames_of_a_video_are_sliced_like_images_where_a_request_asks_for_it(
    planner: Planner, folder: Path, version: str, size: tuple[int, int]
) -> None:
    """The published `chat` with frames as images, max_slice_nums and without use_image_id."""
    if version == "2.5":
        return  # takes images only
    files = [picture(*size, seed) for seed in range(3)]
    made = planned(planner, pictures(files, (0.0, 1.0, 2.0), max_slices=2), "What?")
    sent = list(made.media[0].slices())
    made.files.close()
    _, images = sent_of(planner, *(image(each, max_slices=2) for each in files), "What?")
    wanted = [each for shown in images for each in shown]
    (item,) = made.plan.media
    columns, rows = grid_of(*size, 2) or (0, 0)
    assert item.grid == Grid(3, 1 + columns * rows, minicpm.QUERIES[version])
    assert item.timestamps_s == tuple(time for time in (0.0, 1.0, 2.0) for _ in range(item.grid.h))
    assert [each.first_frame for each in sent] == list(range(len(wanted)))
    assert all(np.array_equal(each.pixels, other) for each, other in zip(sent, wanted, strict=True))
    shown = markers((columns, rows), None, version)
    assert made.plan.input_ids.tolist() == ids_of(folder, f"{shown}\n" * 3 + "What?")


def test_a_number_of_slices_out_of_range_is_refused(planner: Planner, grouping: Path) -> None:
    for most in (0, 10):
        with pytest.raises(InvalidRequest, match=r"image\.frame_sampling\.max_slices must be between 1 and 9"):
            plan_of(planner, image(picture(90, 60), max_slices=most), "What?")
    plan_of(grouping, pictures([picture(90, 60)], (0.0,), max_slices=1), "What?")
    with pytest.raises(InvalidRequest, match=r"video\.frame_sampling\.max_slices must be 1 for videos of this model"):
        plan_of(grouping, pictures([picture(90, 60)], (0.0,), max_slices=2), "What?")


@pytest.mark.parametrize(("seconds", "rate"), [(60, Fraction(25)), (65, Fraction(30)), (600, Fraction(30000, 1001))])
def test_of_a_long_video_64_frames_are_chosen_uniformly(
    tmp_path_factory: pytest.TempPathFactory, seconds: int, rate: Fraction
) -> None:
    folder = tmp_path_factory.mktemp("minicpm2.6")
    minicpm.write(folder, 1, "2.6")
    family, total = family_of(folder), round(seconds * rate)
    times = FrameTimes([number * 1000 for number in range(total)], 1000, 1 / (1000 * rate), (rate,))
    sampled = sample(times, family.frame_bounds, FrameSampling(), family.sample_indices)
    chosen = list(range(0, total, round(rate)))
    if len(chosen) > 64:
        share = len(chosen) / 64
        chosen = [chosen[int(number * share + share / 2)] for number in range(64)]
    assert list(sampled.places) == chosen


@cache
def family_of(folder: Path) -> Any:
    return load_family(Checkpoint(folder))


def published(length_s: Fraction, total: int) -> tuple[list[int], int]:
    """The frames of a video and how many are in each group, as MiniCPM-V-4_5's README chooses them, none twice."""
    if 3 * int(length_s) <= 180:
        group, wanted = 1, round(min(3, round(total / length_s)) * min(180, length_s))
    else:
        group = math.ceil(length_s * 3 / 180)
        group, wanted = (group, round(length_s * 3)) if group <= 3 else (3, 540)
    share = total / wanted
    return [int(number * share + share / 2) for number in range(wanted)], group


@pytest.fixture(scope="module")
def grouping(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("minicpm4.5")
    minicpm.write(made, 1, "4.5")
    return made


@settings(max_examples=40)
@given(total=st.integers(200, 12_000), rate=st.sampled_from([Fraction(3), Fraction(8), Fraction(30000, 1001)]))
@example(total=1800, rate=Fraction(30))
@example(total=182 * 3, rate=Fraction(9))
@example(total=3604, rate=Fraction(30))
@example(total=6000, rate=Fraction(30))
def test_frames_and_groups_are_those_of_the_readme(grouping: Path, total: int, rate: Fraction) -> None:
    family = family_of(grouping)
    bounds = family.frame_bounds
    times = FrameTimes([number * 1000 for number in range(total)], 1000, 1 / (1000 * rate), (rate,))
    sampled = sample(times, bounds, FrameSampling(), family.sample_indices)
    indices, group = published(total / rate, total)
    assert list(sampled.places) == indices
    assert bounds.group_frames is not None
    assert bounds.group_frames(sampled.frames, total / rate) == group


@pytest.mark.parametrize(("wish", "groups", "group"), [({}, 113, 2), ({"fps": 1}, 75, 1), ({"num_frames": 7}, 7, 1)])
def test_a_long_video_is_sent_in_groups(grouping: Path, wish: dict[str, Any], groups: int, group: int) -> None:
    plan, [slices] = sent_of(grouping, video(clip(300, fps=4, width=42, height=28), **wish), "What?")
    sent, (item,) = list(map(len, slices)), plan.media
    assert (item.grid.t, item.grid.h, item.grid.w) == (groups, 1, minicpm.QUERIES["4.5"])
    assert item.frames.group_frames == group
    assert sent == [group] * (groups - 1) + [item.frames.count - group * (groups - 1)]
    assert item.frames.count == sum(sent) == len(item.timestamps_s)
    one = f"<image>{'<unk>' * minicpm.QUERIES['4.5']}</image>"
    assert plan.input_ids.tolist() == ids_of(grouping, f"{one}\n" * groups + "What?")


def test_the_time_of_each_frame_of_a_group_is_part_of_its_content(grouping: Path) -> None:
    one = picture(14, 14)
    times = [number / 4 for number in range(372)]  # more than 2 · 180: groups of three

    def content_hash(times_s: list[float]) -> bytes:
        (item,) = plan_of(grouping, pictures([one] * len(times_s), times_s), "What?").media
        assert item.frames.group_frames == 3
        return item.content_hash

    assert content_hash(times) == content_hash(list(times))
    assert content_hash(times) != content_hash([*times[:4], times[4] + 0.2, *times[5:]])


# --- chat template and processor config -----------------------------------------------------------------------------


def ids_without_slices(folder: Path) -> list[int]:
    """The prompt of a picture without slices and a question."""
    ids: list[int] = plan_of(folder, image(picture(40, 40)), "What?").input_ids.tolist()
    return ids


# As those of Qwen3: without a value, the model decides by itself whether it thinks.
THINKING = (
    "{% if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% endif %}"
)


@pytest.mark.parametrize("version", ["2.6", "4.5"])
def test_the_template_of_4_5_is_told_not_to_think(version: str, tmp_path: Path) -> None:
    minicpm.write(tmp_path, 1, version)
    before = ids_without_slices(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(minicpm.TEMPLATE + THINKING)
    tokenizer = tokenizer_of(tmp_path)
    options = {"enable_thinking": False} if version == "4.5" else {}
    turns = [{"role": "user", "content": "<ref>\nWhat?"}]
    *_, rendered = tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, tokenize=False, **options
    ).partition("What?")
    assert ("<think>" in rendered) == (version == "4.5")
    ours, end = ids_without_slices(tmp_path), tokenizer(rendered.partition("assistant")[2])["input_ids"]
    assert ours[-len(end) :] == end
    assert (ours == before) == (version != "4.5")


def test_images_have_no_numbers_where_the_models_file_says_so_and_the_processors_nothing(tmp_path: Path) -> None:
    minicpm.write(tmp_path, 1, changes={"use_image_id": False})
    path = tmp_path / "preprocessor_config.json"
    settings = json.loads(path.read_text())
    settings.pop("use_image_id", None)
    path.write_text(json.dumps(settings))
    assert ids_without_slices(tmp_path) == ids_of(tmp_path, f"<image>{'<unk>' * 4}</image>\nWhat?")


def test_markers_are_those_of_the_processors_file(tmp_path: Path) -> None:
    minicpm.write(tmp_path / "written", 1)
    changed = {"im_start": "<slice>", "im_end": "</slice>", "unk": "<ref>"}
    folder = with_settings(tmp_path / "written", tmp_path, preprocessor_config=changed)
    shown = f"<image_id>0</image_id><slice>{'<ref>' * 4}</slice>"
    assert ids_without_slices(folder) == ids_of(folder, f"{shown}\nWhat?")
