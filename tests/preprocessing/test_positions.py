"""Positions follow the formula by hand, and transformers' get_rope_index where that follows it too."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

from common.contract.errors import PromptTooLong
from common.contract.plan import MAX_POSITION, Grid, Run
from services.preprocessing.prompt.layout import GridTokens, lay_out
from services.preprocessing.prompt.positions import GridSpan, TextSpan, positions_of

MERGE = 2
grids = st.builds(Grid, t=st.integers(1, 6), h=st.integers(1, 6), w=st.integers(1, 6))


def rope_index(spans: list[TextSpan | GridSpan], tokens_per_second: int) -> torch.Tensor:
    """transformers' positions [3, N] of a prompt of these spans; its time step is a float32."""
    types: list[int] = []
    images, videos, seconds = [], [], []
    for span in spans:
        if isinstance(span, TextSpan):
            types += [0] * span.tokens
            continue
        grid = [span.grid.t, span.grid.h * MERGE, span.grid.w * MERGE]
        if span.time_step:
            videos.append(grid)
            seconds.append(float(span.time_step / tokens_per_second))
        else:
            images.append(grid)
        types += [2 if span.time_step else 1] * span.grid.tokens
    config = Qwen2_5_VLConfig(
        vision_config={"spatial_merge_size": MERGE, "tokens_per_second": tokens_per_second},
    )
    model = Qwen2_5_VLModel.__new__(Qwen2_5_VLModel)
    torch.nn.Module.__init__(model)
    model.config = config
    positions, _ = model.get_rope_index(
        torch.zeros(1, len(types), dtype=torch.long),
        mm_token_type_ids=torch.tensor([types]),
        image_grid_thw=torch.tensor(images) if images else None,
        video_grid_thw=torch.tensor(videos) if videos else None,
        second_per_grid_ts=torch.tensor(seconds) if seconds else None,
    )
    return positions[:, 0]


@st.composite
def prompts(draw: st.DrawFn) -> list[TextSpan | GridSpan]:
    spans: list[TextSpan | GridSpan] = []
    for _ in range(draw(st.integers(1, 4))):
        spans.append(TextSpan(draw(st.integers(1, 9))))
        video = draw(st.booleans())
        grid = draw(grids)
        # Steps of eighths are exact in float32, so that only the formulas can differ.
        step = Fraction(draw(st.integers(1, 16)), 8) if video else Fraction(0)
        spans.append(GridSpan(grid if video else Grid(1, grid.h, grid.w), step))
    spans.append(TextSpan(draw(st.integers(1, 9))))
    return spans


@given(spans=prompts())
def test_positions_equal_transformers_while_time_stays_inside_the_frame(
    spans: list[TextSpan | GridSpan],
) -> None:
    for span in spans:
        if isinstance(span, GridSpan):
            assume((span.grid.t - 1) * span.time_step // 1 < max(span.grid.h, span.grid.w))
    assert positions_of(spans).tolist() == rope_index(spans, tokens_per_second=2).tolist()


@given(spans=prompts())
def test_each_span_starts_behind_all_positions_before_it(spans: list[TextSpan | GridSpan]) -> None:
    positions = positions_of(spans)
    offset = 0
    for span in spans:
        tokens = span.tokens if isinstance(span, TextSpan) else span.grid.tokens
        before, here = positions[:, :offset], positions[:, offset : offset + tokens]
        if offset:
            assert here.min() == before.max() + 1
        offset += tokens


def test_positions_beyond_the_limit_are_refused() -> None:
    """A week each at two positions a second: an int32 holds the positions of 1,771 of them, and an answer."""
    week = GridSpan(Grid(2, 1, 1), Fraction(2 * 7 * 24 * 3600))
    assert positions_of([week] * 1771).max() == 1771 * (week.time_step + 1) - 1
    with pytest.raises(PromptTooLong, match=f"at most {MAX_POSITION}"):
        positions_of([week] * 1772)


def test_no_spans_have_no_positions() -> None:
    assert positions_of([]).shape == (3, 0)


# --- by hand ------------------------------------------------------------------------------------------------


# Two frames a slice: at f frames a second a slice lasts 2 / f seconds, and takes tokens_per_second · 2 / f positions.
@pytest.mark.parametrize(
    ("sampled_fps", "tokens_per_second", "times"),
    [
        (Fraction(1), 2, [0, 4, 8, 12, 16]),
        (Fraction(2), 2, [0, 2, 4, 6, 8]),
        (Fraction(4), 2, [0, 1, 2, 3, 4]),
        (Fraction(1), 25, [0, 50, 100, 150, 200]),
        (Fraction(4), 25, [0, 12, 25, 37, 50]),
        (Fraction(24000, 1001), 25, [0, 2, 4, 6, 8]),  # 2.0854 a slice
        (Fraction(24000, 1001), 2, [0, 0, 0, 0, 0]),  # 0.1668 a slice
    ],
)
def test_slices_are_placed_by_their_time(sampled_fps: Fraction, tokens_per_second: int, times: list[int]) -> None:
    step = 2 / sampled_fps * tokens_per_second
    positions = positions_of([TextSpan(7), GridSpan(Grid(5, 2, 3), step), TextSpan(2)])
    expected = [[7 + time, 7 + row, 7 + column] for time in times for row in range(2) for column in range(3)]
    assert positions[:, 7:37].T.tolist() == expected
    after = 7 + max(*times, 1, 2) + 1  # the maximum over all axes, plus 1
    assert positions[:, 37:].tolist() == [[after, after + 1]] * 3


def test_slice_24_at_23_976_frames_a_second_is_just_past_the_integer() -> None:
    # 24 · 2.0854166… = 50.05; in steps of 1001/480 exactly.
    positions = positions_of([GridSpan(Grid(481, 1, 1), Fraction(1001, 480))])
    assert positions[0, 24] == 50
    assert positions[0, 479] == 998
    assert positions[0, 480] == 1001  # 480 · 1001/480: the last product is a whole number, and floors to itself


def test_products_that_floats_would_put_below_an_integer_are_exact() -> None:
    # 87 frames at 10 a second, of which 8 are sampled, at 2 tokens a second: 2 · 87 / (8 · 10) · 2 = 4.35 a slice.
    step = Fraction(2 * 87, 8 * 10) * 2
    exact = positions_of([GridSpan(Grid(101, 1, 1), step)])[0].tolist()
    assert exact == [435 * index // 100 for index in range(101)]
    assert exact[100] == 435
    assert int(4.35 * 100) == 434


def test_positions_beyond_256_and_2048_are_exact() -> None:
    # One slice each 4 seconds at 25 tokens a second: 100 positions.
    positions = positions_of([TextSpan(300), GridSpan(Grid(40, 1, 2), Fraction(100)), TextSpan(1)])
    assert positions[0, 300:380:2].tolist() == [300 + 100 * index for index in range(40)]
    assert positions[1, 300:380].tolist() == [300] * 80
    assert positions[2, 300:380].tolist() == [300, 301] * 40
    assert positions[:, 380].tolist() == [300 + 3900 + 1] * 3


def test_text_after_an_image_starts_behind_its_longer_side() -> None:
    positions = positions_of([TextSpan(3), GridSpan(Grid(1, 2, 4), Fraction(0)), TextSpan(1)])
    assert positions[0].tolist() == [0, 1, 2, *[3] * 8, 7]
    assert positions[1].tolist() == [0, 1, 2, *[3] * 4, *[4] * 4, 7]
    assert positions[2].tolist() == [0, 1, 2, 3, 4, 5, 6, 3, 4, 5, 6, 7]


def test_slices_of_their_own_start_behind_the_longer_side_of_the_one_before() -> None:
    one = GridSpan(Grid(1, 2, 3), Fraction(0))
    positions = positions_of([TextSpan(3), one, TextSpan(2), one, TextSpan(1)])
    assert positions[0].tolist() == [0, 1, 2, *[3] * 6, 6, 7, *[8] * 6, 11]
    assert positions[1].tolist() == [0, 1, 2, 3, 3, 3, 4, 4, 4, 6, 7, 8, 8, 8, 9, 9, 9, 11]
    assert positions[2].tolist() == [0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7, 8, 9, 10, 8, 9, 10, 11]


def ids(*values: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    return np.array(values, np.int32)


def test_a_layout_joins_ids_positions_and_the_runs_of_each_item() -> None:
    one = GridSpan(Grid(1, 1, 2), Fraction(0))
    video, image = GridTokens(0, 99, one), GridTokens(1, 98, one)
    layout = lay_out([ids(1, 7), video, ids(8), video, image, ids(2)])
    assert layout.input_ids.tolist() == [1, 7, 99, 99, 8, 99, 99, 98, 98, 2]
    assert layout.input_ids.dtype == layout.positions.dtype == np.int32
    assert layout.runs == ((Run(2, 2), Run(5, 2)), (Run(7, 2),))
    assert layout.positions[0].tolist() == [0, 1, 2, 2, 4, 5, 5, 7, 7, 9]
    assert layout.positions[2].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
