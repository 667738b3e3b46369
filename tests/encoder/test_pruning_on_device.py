"""Choosing what is kept asks nothing of the device: how many are kept is known, and which ones the host need not know.

No CUDA here. A device that holds no data answers no question, and knows every shape: torch's own meta device.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from common.contract.plan import Grid
from common.contract.retention import METHODS, Pruning
from services.encoder.pruning import ranking as scores_module
from services.encoder.pruning.methods import Scores, keep_tokens
from services.encoder.tower.transfers import Readback
from tests.encoder.kept import GRIDS, RATES, exact_count
from tests.generation.test_decode_graphs import NoWaiting

# What each keeps at least, by DESIGN: EVS and random a slice's tokens, VidCom2 one of each slice.
FLOORS = {"evs": lambda grid: grid.h * grid.w, "random": lambda grid: grid.h * grid.w, "vidcom2": lambda grid: grid.t}


@pytest.mark.parametrize("method", FLOORS)
@settings(max_examples=15)
@given(grid=GRIDS, rate=RATES)
def test_a_device_without_data_says_what_is_kept(method: str, grid: Grid, rate: float) -> None:
    kept = keep_tokens(torch.empty(grid.tokens, 8, device="meta"), grid, Pruning(rate, method))
    assert kept.device.type == "meta"
    assert kept.dtype == torch.int32
    assert kept.shape == (exact_count(grid, rate, FLOORS[method](grid)),)


@pytest.mark.parametrize("method", FLOORS)
@pytest.mark.parametrize("known", [False, True])
def test_nothing_that_waits_for_a_device_is_called(method: str, known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    grid, pruning, scores = Grid(6, 4, 5), Pruning(0.7, method), dict[str, Scores]()
    embeds = torch.randn(grid.tokens, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = keep_tokens(embeds, grid, pruning, scores)
    for name in ("tolist", "item", "numpy", "cpu", "nonzero", "__bool__", "__int__", "__float__"):
        monkeypatch.setattr(Tensor, name, waited)
    with NoWaiting():  # type: ignore[no-untyped-call]
        found = keep_tokens(embeds, grid, pruning, scores if known else None)
        rows = embeds[None, found.long()]
    monkeypatch.undo()
    assert torch.equal(found, expected)
    assert torch.equal(rows[0], embeds[expected.long()])


def waited(*_: object) -> None:
    raise AssertionError("the host would wait")


def test_every_method_that_prunes_is_held_to_this() -> None:
    assert {*FLOORS, "none"} == set(METHODS)


def test_a_long_video_is_read_in_parts_without_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores_module, "_READ_AT_ONCE", 3 * 16 * 8)
    for method in FLOORS:
        assert keep_tokens(torch.empty(7 * 16, 8, device="meta"), Grid(7, 4, 4), Pruning(0.5, method)).shape == (56,)


def test_on_the_cpu_nothing_is_copied_to_be_read() -> None:
    tensors = [torch.arange(6).view(2, 3), torch.ones(2)]
    assert all(one is other for one, other in zip(Readback(*tensors).wait(), tensors, strict=True))


@given(st.integers(0, 2**32 - 1), GRIDS, RATES)
def test_random_keeps_what_the_seed_says_wherever_the_embeddings_are(seed: int, grid: Grid, rate: float) -> None:
    order = torch.randperm(grid.tokens, generator=torch.Generator().manual_seed(seed)).numpy()
    count = exact_count(grid, rate, FLOORS["random"](grid))
    # A token's score is its place in the order.
    best = np.sort(np.argsort(-order)[:count])
    found = keep_tokens(torch.zeros(grid.tokens, 2), grid, Pruning(rate, "random", seed))
    assert found.tolist() == best.tolist()
