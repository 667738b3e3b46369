"""Positions agree with transformers' get_rope_index where it follows the formula, and with the formula elsewhere."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

from common.contract.errors import PromptTooLong
from common.contract.plan import MAX_POSITION, Grid
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
def test_positions_are_those_of_transformers_while_time_stays_inside_the_frame(
    spans: list[TextSpan | GridSpan],
) -> None:
    for span in spans:
        if isinstance(span, GridSpan):
            assume((span.grid.t - 1) * span.time_step // 1 < max(span.grid.h, span.grid.w))
    assert positions_of(spans).tolist() == rope_index(spans, tokens_per_second=2).tolist()


@given(spans=prompts())
def test_text_after_media_stands_behind_everything_before_it(spans: list[TextSpan | GridSpan]) -> None:
    positions = positions_of(spans)
    offset = 0
    for span in spans:
        tokens = span.tokens if isinstance(span, TextSpan) else span.grid.tokens
        before, here = positions[:, :offset], positions[:, offset : offset + tokens]
        if offset:
            assert here.min() == before.max() + 1
        offset += tokens


def test_videos_that_last_too_long_together_are_refused() -> None:
    """A week each at two positions a second: an int32 holds the positions of 1,771 of them, and an answer."""
    week = GridSpan(Grid(2, 1, 1), Fraction(2 * 7 * 24 * 3600))
    assert positions_of([week] * 1771).max() == 1771 * (week.time_step + 1) - 1
    with pytest.raises(PromptTooLong, match=f"at most {MAX_POSITION}"):
        positions_of([week] * 1772)


def test_no_spans_have_no_positions() -> None:
    assert positions_of([]).shape == (3, 0)
