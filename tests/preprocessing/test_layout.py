"""The full prompt is its pieces in order, and each media item knows where its tokens stand."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from common.contract.plan import Grid, Run
from services.preprocessing.prompt.layout import GridTokens, lay_out
from services.preprocessing.prompt.positions import GridSpan


def ids(*values: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    return np.array(values, np.int32)


def test_a_grid_becomes_as_many_pads_as_it_has_tokens() -> None:
    video = GridTokens(0, 99, GridSpan(Grid(2, 1, 2), Fraction(3)))
    layout = lay_out([ids(1, 2), video, ids(3)])
    assert layout.input_ids.tolist() == [1, 2, 99, 99, 99, 99, 3]
    assert layout.runs == ((Run(2, 4),),)
    assert layout.positions.tolist() == [
        [0, 1, 2, 2, 5, 5, 6],
        [0, 1, 2, 2, 2, 2, 6],
        [0, 1, 2, 3, 2, 3, 6],
    ]
    assert layout.input_ids.dtype == layout.positions.dtype == np.int32


def test_text_between_a_videos_slices_is_text_and_splits_its_runs() -> None:
    one = GridSpan(Grid(1, 1, 2), Fraction(0))
    video, image = GridTokens(0, 99, one), GridTokens(1, 98, one)
    layout = lay_out([ids(1, 7), video, ids(8), video, image, ids(2)])
    assert layout.input_ids.tolist() == [1, 7, 99, 99, 8, 99, 99, 98, 98, 2]
    assert layout.runs == ((Run(2, 2), Run(5, 2)), (Run(7, 2),))
    assert layout.positions[0].tolist() == [0, 1, 2, 2, 4, 5, 5, 7, 7, 9]
    assert layout.positions[2].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
