"""A tower's graphs are measured against its forward without one: each budget, filled, by the middle of several runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest

from services.encoder.tower.graphs import TowerGraphs, with_graphs
from services.encoder.tower.tower import ModelForward
from tests.encoder.tower_recorder import Recorder, load_packed
from tests.families import FAMILIES


@pytest.mark.parametrize("most_tokens", [1, 2, 5, 40, 64, 100])
def test_every_budget_is_measured_however_small(tiny_checkpoint: Path, most_tokens: int) -> None:
    recorder = Recorder(eager_s=3.0)
    forward = with_graphs(load_packed(tiny_checkpoint), most_tokens, recorder).forward
    assert isinstance(forward, TowerGraphs)
    assert [each.bucket.tokens for each in forward.measured] == sorted({min(64, most_tokens), most_tokens})
    assert {(each.replay_s, each.eager_s) for each in forward.measured} == {(1.0, 3.0)}
    assert len(set(recorder.replayed)) == len(forward.measured)


def test_what_is_measured_is_the_middle_of_several_runs_that_are_not_the_first(tiny_checkpoint: Path) -> None:
    """Of a graph as of a forward without: the first run of each sets things up, and now and then one is held up."""

    class HeldUp(Recorder):
        def measure_s(self, run: Callable[[], object]) -> float:
            taken = super().measure_s(run)
            runs = len(self.replayed) if taken == 1.0 else without.call_count
            assert runs > 1
            return 60.0 if runs in (2, 5) else taken

    with patch.object(ModelForward, "__call__", autospec=True, side_effect=ModelForward.__call__) as without:
        forward = with_graphs(load_packed(tiny_checkpoint), 64, HeldUp(eager_s=3.0)).forward
    assert isinstance(forward, TowerGraphs)
    assert [(each.replay_s, each.eager_s) for each in forward.measured] == [(1.0, 3.0)]


@pytest.mark.parametrize(("most_tokens", "measured"), [(160, [1, 2, 2]), (1024, [1, 2, 4, 8, 16])])
def test_a_budget_is_measured_with_as_many_small_squares_as_fill_it(
    tiny_checkpoint: Path, most_tokens: int, measured: list[int]
) -> None:
    """8 tokens a side; without a graph the same is measured."""
    tower, sides = load_packed(tiny_checkpoint), []
    assert isinstance(tower.forward, ModelForward)
    with patch.object(ModelForward, "__call__", lambda _, patches, given: sides.append(given)):
        with_graphs(tower, most_tokens, Recorder())
    merge = FAMILIES["qwen2_5_vl"].merge
    assert sides[:: len(sides) // len(measured)] == [[(8 * merge, 8 * merge)] * count for count in measured]
