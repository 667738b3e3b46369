"""The tower on CUDA: graphs compute what it computes without them, pruning on, and nothing in a forward waits."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch import Tensor

from common.checkpoint import Checkpoint
from common.plan import Grid
from common.retention import Pruning
from services.encoder.attention import check_kernel, find_attention
from services.encoder.batcher import Batcher
from services.encoder.families import load_tower
from services.encoder.forward import ModelForward
from services.encoder.graphs import TowerGraphs, with_graphs
from services.encoder.pruning import keep_tokens
from services.encoder.tower import Tower
from tests.families import FAMILIES, FamilyUnderTest

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")

CUDA = torch.device("cuda")
MOST_TOKENS = 512
# bfloat16 and float16 at values of about one, products of other shapes being summed in another order.
TOLERANCE = {torch.bfloat16: 0.1, torch.float16: 0.02}


@pytest.fixture(scope="module")
def shape(family: str) -> FamilyUnderTest:
    return FAMILIES[family]


@pytest.fixture(scope="module", params=list(TOLERANCE), ids=str)
def tower(request: pytest.FixtureRequest, family_checkpoint: Path) -> Tower:
    tower = load_tower(Checkpoint(family_checkpoint), str(request.param).removeprefix("torch."), CUDA)
    assert isinstance(tower.forward, ModelForward)
    if not tower.forward.varlen:
        pytest.skip("this torch has no variable-length attention for this card")
    return tower


@pytest.fixture(scope="module")
def graphed(tower: Tower) -> Tower:
    graphed = with_graphs(tower, MOST_TOKENS)
    assert isinstance(graphed.forward, TowerGraphs)
    assert [each.tokens for each in graphed.forward.budgets] == [64, 128, 256, 512]
    return graphed


def slices_of(sides: list[tuple[int, int]], shape: FamilyUnderTest, seed: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [
        torch.randint(
            0,
            256,
            (shape.temporal_patch, rows * shape.token_px, columns * shape.token_px, 3),
            dtype=torch.uint8,
            generator=draw,
        )
        for rows, columns in sides
    ]


def random_sides(seed: int) -> list[tuple[int, int]]:
    """One video of several slices, and others' slices around it."""
    draw = random.Random(seed)
    others = [(draw.randint(1, 9), draw.randint(1, 9)) for _ in range(draw.randint(0, 4))]
    return [*others, *[(draw.randint(2, 7), draw.randint(2, 7))] * 3]


@pytest.mark.parametrize("seed", range(12))
def test_replays_are_the_eager_forward_with_pruning_on(
    tower: Tower, graphed: Tower, shape: FamilyUnderTest, seed: int
) -> None:
    sides = random_sides(seed)
    slices = slices_of(sides, shape, seed)
    eager, replayed = (torch.cat(each.encode(slices)[-3:], dim=1) for each in (tower, graphed))
    tolerance = TOLERANCE[tower.dtype]
    torch.testing.assert_close(replayed, eager, atol=tolerance, rtol=tolerance)
    kept = keep_tokens(replayed[0], Grid(3, *sides[-1]), Pruning(0.5, "evs"))
    assert len(kept) == max(sides[-1][0] * sides[-1][1], int(Fraction(3, 2) * sides[-1][0] * sides[-1][1]))
    torch.testing.assert_close(replayed[:, kept.long()], eager[:, kept.long()], atol=tolerance, rtol=tolerance)


def test_what_was_returned_stays(graphed: Tower, shape: FamilyUnderTest) -> None:
    first = graphed.encode(slices_of([(4, 4)], shape, 0))[0]
    copy = first.clone()
    graphed.encode(slices_of([(4, 4)], shape, 1))
    assert torch.equal(first, copy)


def test_towers_compute_what_the_cpu_does_in_float32(
    tower: Tower, family_checkpoint: Path, shape: FamilyUnderTest
) -> None:
    slices = slices_of([(3, 4), (7, 2)], shape, 0)
    exact = load_tower(Checkpoint(family_checkpoint), "float32", torch.device("cpu")).encode(slices)
    for ours, expected in zip(tower.encode(slices), exact, strict=True):
        difference = (ours.float().cpu() - expected).abs().mean()
        assert difference < TOLERANCE[tower.dtype] * expected.abs().mean()


def test_frames_may_be_on_the_device_already(graphed: Tower, shape: FamilyUnderTest) -> None:
    slices = slices_of([(3, 4), (7, 2)], shape, 0)
    for sent, there in zip(graphed.encode(slices), graphed.encode([each.to(CUDA) for each in slices]), strict=True):
        assert torch.equal(sent, there)


@contextmanager
def nothing_waits() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("attention", ["auto", "sdpa"])
def test_no_forward_without_a_graph_waits_for_the_device(
    family_checkpoint: Path, shape: FamilyUnderTest, attention: str
) -> None:
    tower = load_tower(Checkpoint(family_checkpoint), "bfloat16", CUDA, attention)  # type: ignore[arg-type]
    slices = slices_of([(3, 4), (7, 2)], shape, 0)
    tower.encode(slices)
    with nothing_waits():
        tower.encode(slices)


def test_no_replay_waits_for_the_device(graphed: Tower, shape: FamilyUnderTest) -> None:
    for sides in ([(3, 4), (7, 2)], [(8, 8)] * 4, [(30, 20)]):
        slices = slices_of(sides, shape, 0)
        graphed.encode(slices)
        with nothing_waits():
            graphed.encode(slices)


def test_what_the_batcher_tells_as_done_is_done(graphed: Tower, shape: FamilyUnderTest) -> None:
    batcher = Batcher(graphed.encode, MOST_TOKENS, graphed.packing)
    slices = slices_of([(6, 5)] * 12, shape, 0)
    levels = 1 + shape.levels
    targets = [torch.full((levels, 30, shape.hidden), torch.nan, dtype=graphed.dtype, device=CUDA) for _ in slices]
    torch.cuda.synchronize()
    submitted = [batcher.submit(frames, target) for frames, target in zip(slices, targets, strict=True)]
    elsewhere = torch.cuda.Stream()
    for encoded, target in zip(submitted, targets, strict=True):
        encoded.result(60)
        with torch.cuda.stream(elsewhere):
            assert target.isfinite().all()
    batcher.close()


def test_memory_stays_flat(graphed: Tower, shape: FamilyUnderTest) -> None:
    used: list[int] = []
    for seed in range(60):
        graphed.encode(slices_of(random_sides(seed % 20), shape, seed))
        torch.cuda.synchronize()
        used.append(torch.cuda.memory_allocated())
    assert max(used[20:]) <= max(used[:20])


@pytest.mark.parametrize(("heads", "head_dim"), [(16, 80), (16, 72), (2, 16)])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_a_variable_length_kernel_is_right_where_there_is_one(dtype: torch.dtype, heads: int, head_dim: int) -> None:
    attend = find_attention("auto", CUDA, dtype, heads, head_dim)
    if attend is None:
        pytest.skip("this torch has no variable-length attention for this card")
    check_kernel(attend, CUDA, dtype, heads, head_dim)
