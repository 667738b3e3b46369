"""The tower on CUDA: graphs compute what the eager forward computes, and no forward synchronises with the device.

Tests of the variable-length kernel are skipped only on cards that are too old for it.
"""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import TypeVar
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from prometheus_client import REGISTRY
from torch import Tensor

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.plan import Grid
from gridsieve.common.contract.retention import ItemPruning
from gridsieve.services.compute.graphs import Captured
from gridsieve.services.encoder.items.batcher import Batcher
from gridsieve.services.encoder.pruning.methods import keep_tokens
from gridsieve.services.encoder.startup.build import compile_tower
from gridsieve.services.encoder.tower import graphs
from gridsieve.services.encoder.tower.attention import find_attention
from gridsieve.services.encoder.tower.graphs import CudaDevice, TowerGraphs, with_graphs
from gridsieve.services.encoder.tower.loading import load_tower
from gridsieve.services.encoder.tower.tower import Tower
from tests.families import FAMILIES, FamilyUnderTest
from tests.gpu.waits import waits_forbidden

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")

CUDA = torch.device("cuda")
FLASH_FROM = (8, 0)  # the lowest compute capability of torch's flash kernel
MOST_TOKENS = 512
MIB = 2**20
# For values of about one: matrix products of other shapes sum in another order.
TOLERANCE = {torch.bfloat16: 0.1, torch.float16: 0.02}


@pytest.fixture(scope="module")
def shape(family: str) -> FamilyUnderTest:
    return FAMILIES[family]


@pytest.fixture(scope="module")
def flash() -> None:
    if torch.cuda.get_device_capability() < FLASH_FROM:
        pytest.skip("this card is older than torch's variable-length attention")


@pytest.fixture(scope="module", params=list(TOLERANCE), ids=str)
def tower(request: pytest.FixtureRequest, family_checkpoint: Path, flash: None) -> Tower:
    return load_tower(Checkpoint(family_checkpoint), str(request.param).removeprefix("torch."), CUDA, "varlen")


@pytest.fixture(scope="module")
def graphed(tower: Tower, shape: FamilyUnderTest) -> Iterator[Tower]:
    """The tower with graphs, which it replays even where that is slower."""
    graphed = with_graphs(tower, MOST_TOKENS * loads(tower, shape))
    assert isinstance(graphed.forward, TowerGraphs)
    with patch.object(graphs, "pays", return_value=True):
        yield graphed


T = TypeVar("T", bound=Callable[..., None])


def of_two_towers(test: T) -> T:
    """Of slices of any size, and of one size: for what depends neither on a family's layers nor on the dtype."""
    one_dtype = pytest.mark.parametrize("tower", [torch.bfloat16], indirect=True, ids=str)
    return one_dtype(pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"], indirect=True)(test))


def loads(tower: Tower, shape: FamilyUnderTest) -> int:
    """Merged patches of a token: of towers whose tokens are merged behind them, more than one."""
    return (shape.token_px // tower.patches.token_px) ** 2


def grid_of(tower: Tower, frames: Tensor, slices: int) -> Grid:
    """Of so many slices like this one."""
    sides = tower.patches.grid(*frames.shape[1:3])
    assert sides is not None
    return Grid(slices, *sides)


@contextmanager
def replays(count: int) -> Iterator[None]:
    """Expects this many replays inside."""
    before = REGISTRY.get_sample_value("gridsieve_encoder_graph_replays_total")
    assert before is not None
    yield
    assert REGISTRY.get_sample_value("gridsieve_encoder_graph_replays_total") == before + count


def slices_of(sides: list[tuple[int, int]], shape: FamilyUnderTest, seed: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [
        torch.randint(
            0,
            256,
            (shape.temporal_patch, *(side * shape.token_px for side in shape.sized(*each)), 3),
            dtype=torch.uint8,
            generator=draw,
        )
        for each in sides
    ]


def random_sides(shape: FamilyUnderTest, seed: int) -> list[tuple[int, int]]:
    """Sides of slices: up to four of other media, then three equal ones of a video."""
    draw = random.Random(seed)
    others = [(draw.randint(1, 9), draw.randint(1, 9)) for _ in range(draw.randint(0, 4))]
    return [shape.sized(*each) for each in (*others, *[(draw.randint(2, 7), draw.randint(2, 7))] * 3)]


def test_replays_equal_the_eager_forward_with_pruning(tower: Tower, graphed: Tower, shape: FamilyUnderTest) -> None:
    for seed in range(12):
        slices = slices_of(random_sides(shape, seed), shape, seed)
        grid = grid_of(tower, slices[-1], 3)
        eager = torch.cat(tower.encode(slices)[-3:], dim=1)
        with replays(1):
            replayed = torch.cat(graphed.encode(slices)[-3:], dim=1)
        tolerance = TOLERANCE[tower.dtype]
        torch.testing.assert_close(replayed, eager, atol=tolerance, rtol=tolerance)
        kept = keep_tokens(replayed[0], grid, ItemPruning(0.5, "evs"))
        assert len(kept) == int(Fraction(3, 2) * grid.h * grid.w)


@pytest.mark.filterwarnings("ignore:.torch.jit.script")  # torch itself uses it while it compiles
def test_compiled_layers_compute_what_the_eager_ones_do_also_as_graphs(
    tower: Tower, family_checkpoint: Path, shape: FamilyUnderTest
) -> None:
    compiled = load_tower(Checkpoint(family_checkpoint), str(tower.dtype).removeprefix("torch."), CUDA, "varlen")
    assert compile_tower(compiled)
    graphed = with_graphs(compiled, MOST_TOKENS * loads(tower, shape))
    for seed in range(3):
        slices = slices_of(random_sides(shape, seed), shape, seed)
        expected, tolerance = tower.encode(slices), TOLERANCE[tower.dtype]
        torch.testing.assert_close(compiled.encode(slices), expected, atol=tolerance, rtol=tolerance)
        with replays(1), patch.object(graphs, "pays", return_value=True):
            torch.testing.assert_close(graphed.encode(slices), expected, atol=tolerance, rtol=tolerance)


def test_towers_compute_what_float32_on_the_cpu_computes(
    tower: Tower, family_checkpoint: Path, shape: FamilyUnderTest
) -> None:
    slices = slices_of([(3, 4), (7, 2)], shape, 0)
    exact = load_tower(Checkpoint(family_checkpoint), "float32", torch.device("cpu")).encode(slices)
    for ours, expected in zip(tower.encode(slices), exact, strict=True):
        difference = (ours.float().cpu() - expected).abs().mean()
        assert difference < TOLERANCE[tower.dtype] * expected.abs().mean()


@pytest.mark.parametrize("attention", ["auto", "sdpa"])
def test_an_eager_forward_does_not_synchronise(family_checkpoint: Path, shape: FamilyUnderTest, attention: str) -> None:
    tower = load_tower(Checkpoint(family_checkpoint), "bfloat16", CUDA, attention)  # type: ignore[arg-type]
    slices = slices_of([(3, 4), (7, 2)], shape, 0)
    tower.encode(slices)
    with waits_forbidden():
        tower.encode(slices)


@of_two_towers
def test_a_replay_does_not_synchronise(graphed: Tower, shape: FamilyUnderTest) -> None:
    for sides, count in (([(3, 4), (7, 2)], 1), ([(8, 8)] * 4, 1), ([(30, 20)], int(shape.side > 0))):
        slices = slices_of(sides, shape, 0)
        graphed.encode(slices)
        with replays(count), waits_forbidden():
            graphed.encode(slices)


@of_two_towers
def test_embeddings_that_the_batcher_reports_are_complete(graphed: Tower, shape: FamilyUnderTest) -> None:
    batcher = Batcher(graphed.encode, graphed.packing)
    batcher.start()
    slices, tokens = slices_of([(6, 5)] * 12, shape, 0), math.prod(shape.sized(6, 5))
    levels = 1 + shape.levels
    targets = [torch.full((levels, tokens, shape.hidden), torch.nan, dtype=graphed.dtype, device=CUDA) for _ in slices]
    torch.cuda.synchronize()
    submitted = [batcher.submit(frames, target) for frames, target in zip(slices, targets, strict=True)]
    elsewhere = torch.cuda.Stream()
    for encoded, target in zip(submitted, targets, strict=True):
        encoded.result(60)
        with torch.cuda.stream(elsewhere):
            assert target.isfinite().all()
    batcher.close()


@of_two_towers
def test_five_hundred_requests_do_not_grow_memory(graphed: Tower, shape: FamilyUnderTest) -> None:
    def encode_fifty(first: int) -> tuple[int, int]:
        for seed in range(first, first + 50):
            slices = slices_of(random_sides(shape, seed), shape, seed)
            embeds = graphed.encode(slices)
            keep_tokens(torch.cat(embeds[-3:], dim=1)[0], grid_of(graphed, slices[-1], 3), ItemPruning(0.5, "evs"))
        del embeds
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    used = [encode_fifty(first) for first in range(0, 500, 50)]
    settled = used[1]
    assert all(abs(allocated - settled[0]) < MIB for allocated, _ in used[2:]), used
    assert all(reserved <= settled[1] + 64 * MIB for _, reserved in used[2:]), used


@pytest.mark.parametrize(("heads", "head_dim"), [(16, 80), (16, 72), (2, 16)])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.usefixtures("flash")
def test_the_variable_length_kernel_is_correct(dtype: torch.dtype, heads: int, head_dim: int) -> None:
    """With longer and more sequences than the check at startup, and the bound of a graph of 2048 tokens."""
    attend = find_attention("varlen", CUDA, dtype, heads, head_dim)
    assert attend is not None
    lengths = [1024, 7, 256, *[64] * 20, 1]
    draw = torch.Generator(CUDA).manual_seed(1)
    drawn = torch.randn(sum(lengths), 3, heads, head_dim, generator=draw, device=CUDA).to(dtype)
    ends = torch.tensor([0, *lengths, *[0] * 100], device=CUDA).cumsum(0, dtype=torch.int32)
    query, key, value = drawn.unbind(1)
    found = attend(query, key, value, ends, ends, 8192, 8192)
    for ours, each in zip(found.split(lengths), drawn.double().split(lengths), strict=True):
        expected = F.scaled_dot_product_attention(*each.permute(1, 2, 0, 3)).transpose(0, 1)
        torch.testing.assert_close(ours.double(), expected, atol=1e-2, rtol=1e-2)


class Raising(CudaDevice):
    """Captures that fail halfway."""

    def __call__(self, inputs: Sequence[Tensor], compute: Callable[[], Tensor]) -> Captured:
        def compute_and_raise() -> Tensor:
            found = compute()
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError("no graph can hold this")
            return found

        return super().__call__(inputs, compute_and_raise)


class Waiting(CudaDevice):
    """Captures a computation that synchronises."""

    def __call__(self, inputs: Sequence[Tensor], compute: Callable[[], Tensor]) -> Captured:
        return super().__call__(inputs, lambda: compute() * inputs[0].sum().item())


@of_two_towers
@pytest.mark.parametrize("device", [Raising, Waiting])
def test_a_capture_that_fails_leaves_the_tower_and_the_stream_as_they_were(
    tower: Tower, graphed: Tower, shape: FamilyUnderTest, device: type[CudaDevice]
) -> None:
    stream, mode = torch.cuda.current_stream(), torch.cuda.get_sync_debug_mode()
    slices, tolerance = slices_of([(3, 4), (7, 2)], shape, 0), TOLERANCE[tower.dtype]
    expected = tower.encode(slices)
    uncaptured = with_graphs(tower, MOST_TOKENS, device(CUDA))
    assert uncaptured.packing is None
    assert torch.cuda.current_stream() == stream
    assert torch.cuda.get_sync_debug_mode() == mode
    torch.testing.assert_close(uncaptured.encode(slices), expected, atol=tolerance, rtol=tolerance)
    with replays(1):
        torch.testing.assert_close(graphed.encode(slices), expected, atol=tolerance, rtol=tolerance)
