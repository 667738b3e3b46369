"""A tower of several ranks encodes as one does, each rank within its budget and on a device of its own.

Ranks are threads here; processes are `integration/test_encoder_ranks.py`'s.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.checkpoint import Checkpoint
from common.contract.errors import StartupError
from services.encoder.families import load_tower
from services.encoder.settings import EncoderSettings
from services.encoder.startup.build import device_of
from services.encoder.tower.graph_buckets import PackingLimit, Size
from services.encoder.tower.parallel.assignment import assign
from services.encoder.tower.parallel.tower import DataParallelTower
from services.encoder.tower.tower import Tower
from tests.encoder.thread_ranks import Made, Ranks, ThreadRanks, check_equal, slices_of

pytest_plugins = ["tests.encoder.thread_ranks_fixtures"]

CASES = {
    "a video": [(2, 4, 4)] * 7,
    "an image": [(1, 5, 3)],
    "images": [(1, 5, 3), (1, 2, 2), (1, 8, 8)],
    "a slice short of frames": [(2, 3, 3), (2, 3, 3), (1, 3, 3)],
    "videos and images": [(2, 4, 4), (2, 4, 4), (1, 2, 7), (2, 6, 2), (2, 6, 2), (2, 6, 2), (1, 1, 1), (2, 4, 4)],
}


@pytest.fixture(scope="module")
def two(ranks_of: Ranks) -> Made:
    return ranks_of(2)


@pytest.fixture(scope="module")
def four(ranks_of: Ranks) -> Made:
    return ranks_of(4)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("count", ["two", "four"])
def test_ranks_encode_as_one_process_does(tower: Tower, request: pytest.FixtureRequest, count: str, case: str) -> None:
    towers, _ = request.getfixturevalue(count)
    slices = slices_of(tower, *CASES[case])
    check_equal(towers.encode(slices), tower.encode(slices))


@settings(max_examples=20)
@given(st.lists(st.tuples(st.integers(1, 2), st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=9))
def test_any_slices_come_back_in_their_order(tower: Tower, four: Made, sizes: list[tuple[int, int, int]]) -> None:
    slices = slices_of(tower, *sizes)
    check_equal(four[0].encode(slices), [tower.encode([each])[0] for each in slices])


def test_each_rank_runs_what_is_assigned_to_it(tower: Tower, ranks_of: Ranks) -> None:
    towers, others = ranks_of(2)
    # The first costs more than two of half its tokens, so that the last is not its rank's.
    slices = slices_of(tower, (2, 8, 8), (2, 2, 5), (2, 4, 8), (2, 8, 4))
    towers.encode(slices)
    shares = assign([tower.cost(tokens) for tokens in (64, 10, 32, 32)], 2).shares
    assert shares == [[0], [2, 3, 1]]
    assert ran(towers, others) == [[[tuple(slices[i].shape) for i in sorted(share)]] for share in shares]


def ran(towers: DataParallelTower, others: ThreadRanks) -> list[list[list[tuple[int, ...]]]]:
    """The shapes of all slices, by rank and forward."""
    return [each.forwards for each in (cast(Any, towers.own), *others.towers.values())]


def test_a_rank_without_a_share_is_told_nothing(tower: Tower, ranks_of: Ranks) -> None:
    towers, others = ranks_of(2)
    (alone,) = slices_of(tower, (2, 3, 3))
    check_equal(towers.encode([alone]), tower.encode([alone]))
    assert others.told[1] == []
    check_equal(towers.encode([alone, alone]), tower.encode([alone, alone]))  # and is there when there is something
    assert len(others.told[1]) == 1


def test_each_rank_keeps_to_the_budget_of_one_forward(tower: Tower, ranks_of: Ranks) -> None:
    towers, others = ranks_of(2, rank_tokens=40)
    assert towers.budget_tokens == towers.packing.largest.tokens == 80
    slices = slices_of(tower, *[(2, 4, 4)] * 8, (2, 7, 7), *[(2, 2, 3)] * 3)
    check_equal(towers.encode(slices), tower.encode(slices))
    forwards = [forward for of_rank in ran(towers, others) for forward in of_rank]
    assert sum(map(len, forwards)) == len(slices)
    for forward in forwards:
        tokens = [tower.patches.tokens(shape) for shape in forward]
        assert sum(tokens) <= 40 or tokens == [49]
    assert len(forwards) < len(slices)


def test_a_towers_own_packing_holds_on_each_rank_and_is_as_much_more_for_all(tower: Tower, ranks_of: Ranks) -> None:
    packing = PackingLimit(Size(100, 2, 5), lambda frames: Size(tower.patches.tokens(frames), 1, 2))
    towers, others = ranks_of(3, own=replace(tower, packing=packing))
    assert towers.packing == PackingLimit(Size(300, 6, 15), packing.size_of)
    slices = slices_of(tower, *[(2, 2, 2)] * 9)
    check_equal(towers.encode(slices), tower.encode(slices))
    assert [[len(forward) for forward in of_rank] for of_rank in ran(towers, others)] == [[2, 1]] * 3


def test_embeddings_come_back_in_the_towers_own_dtype(family_checkpoint: Path, ranks_of: Ranks) -> None:
    half = load_tower(Checkpoint(family_checkpoint), "bfloat16", torch.device("cpu"))
    towers, _ = ranks_of(2, own=half)
    slices = slices_of(half, (2, 2, 2), (2, 2, 2), (1, 3, 2))
    for found, expected in zip(towers.encode(slices), (half.encode([each])[0] for each in slices), strict=True):
        assert torch.equal(found, expected)
        assert found.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("device", "cards", "found"),
    [
        ("cpu", 0, ["cpu"] * 3),
        ("cuda", 3, ["cuda:0", "cuda:1", "cuda:2"]),
        ("cuda:2", 5, ["cuda:2", "cuda:3", "cuda:4"]),
        ("auto", 3, ["cuda:0", "cuda:1", "cuda:2"]),
        ("auto", 0, ["cpu"] * 3),
        ("cuda", 2, "wants as many CUDA devices from cuda:0 on, there are 2 in all"),
        ("cuda:1", 3, "wants as many CUDA devices from cuda:1 on, there are 3 in all"),
    ],
)
def test_each_rank_has_a_card_of_its_own_where_there_are_cards(
    monkeypatch: pytest.MonkeyPatch, device: str, cards: int, found: list[str] | str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cards > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)  # nothing is on them
    told = EncoderSettings.load(["--device", device, "--data-parallel", "3"])
    if isinstance(found, str):
        with pytest.raises(StartupError, match=found):
            device_of(told, 0)
    else:
        assert [str(device_of(told, rank)) for rank in range(3)] == found
