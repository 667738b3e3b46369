"""Graph replays compute what transformers' tower computes; which forwards are replayed, and how buckets are timed.

Without CUDA: graphs are recorded by `tower_recorder.Recorder`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import pytest
import structlog
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import REGISTRY
from torch import Tensor

from common.checkpoint import Checkpoint
from services.encoder.families import load_tower
from services.encoder.tower.graph_buckets import Eager, Size, fitting
from services.encoder.tower.graphs import Captured, TowerGraphs, with_graphs
from services.encoder.tower.tower import ModelForward, Tower
from tests.encoder.test_tower import levels_of, pixel_values, processor_of
from tests.encoder.tower_recorder import CPU, STALE_BYTE, Recorder, load_packed
from tests.families import FAMILIES, FamilyUnderTest, load_reference

MOST_TOKENS = 160

Expect = Callable[[Sequence[Tensor]], list[Tensor]]


@pytest.fixture(scope="module")
def shape(family: str) -> FamilyUnderTest:
    return FAMILIES[family]


@pytest.fixture(scope="module")
def packed(family_checkpoint: Path) -> Tower:
    return load_packed(family_checkpoint)


@dataclass(frozen=True)
class Graphed:
    tower: Tower
    recorder: Recorder


@pytest.fixture(scope="module")
def captured(packed: Tower) -> Graphed:
    recorder = Recorder()
    return Graphed(with_graphs(packed, MOST_TOKENS, recorder), recorder)


@pytest.fixture
def graphed(captured: Graphed) -> Graphed:
    """With an empty record of replays."""
    captured.recorder.replayed.clear()
    return captured


@pytest.fixture(scope="module")
def expect(family: str, family_checkpoint: Path, shape: FamilyUnderTest) -> Expect:
    """Embeddings from transformers' tower on its processor's patches, with its own attention."""
    reference, processor = load_reference(family, family_checkpoint).model.visual, processor_of(family_checkpoint)

    @torch.no_grad()
    def encode(slices: Sequence[Tensor]) -> list[Tensor]:
        pixels = torch.cat([pixel_values(frames, processor, shape) for frames in slices])
        sides = [(frames.shape[1] // shape.patch_px, frames.shape[2] // shape.patch_px) for frames in slices]
        embeds = levels_of(reference(pixels, grid_thw=torch.tensor([(1, *side) for side in sides])))
        return list(embeds.split([rows * columns // shape.merge**2 for rows, columns in sides], dim=1))

    return encode


@st.composite
def slices_of_tokens(draw: st.DrawFn) -> list[tuple[int, int]]:
    return draw(st.lists(st.tuples(st.integers(1, 7), st.integers(1, 7)), min_size=1, max_size=7))


def random_slices(sides: Sequence[tuple[int, int]], shape: FamilyUnderTest, seed: int = 0) -> list[Tensor]:
    """Without STALE_BYTE, with which the recorder marks unwritten inputs."""
    random = torch.Generator().manual_seed(seed)
    return [
        torch.randint(
            0,
            STALE_BYTE,
            (shape.temporal_patch, rows * shape.token_px, columns * shape.token_px, 3),
            dtype=torch.uint8,
            generator=random,
        )
        for rows, columns in sides
    ]


def encode_in_batches(tower: Tower, slices: Sequence[Tensor]) -> list[Tensor]:
    assert tower.packing is not None
    found: list[Tensor] = []
    while len(found) < len(slices):
        left = slices[len(found) :]
        count = fitting([tower.packing.size_of(frames.shape) for frames in left], tower.packing.largest)
        found += tower.encode(left[:count])
    return found


def assert_same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def counted(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"framesieve_encoder_{name}_total", labels) or 0.0


# --- replays ----------------------------------------------------------------------------------------------------


@settings(max_examples=8, deadline=None)
@given(sides=slices_of_tokens())
def test_replays_equal_transformers_tower(
    captured: Graphed, shape: FamilyUnderTest, expect: Expect, sides: list[tuple[int, int]]
) -> None:
    captured.recorder.replayed.clear()
    slices = random_slices(sides, shape)
    # The first results must survive the later replays.
    found = encode_in_batches(captured.tower, slices) + encode_in_batches(captured.tower, slices[::-1])
    assert captured.recorder.replayed
    expected = expect(slices)
    assert_same(found, expected + expected[::-1])


def test_buckets_are_captured_largest_first_and_limit_a_forward(captured: Graphed, shape: FamilyUnderTest) -> None:
    packing = captured.tower.packing
    assert packing is not None
    assert (packing.largest.tokens, packing.largest.slices) == (160, 5)
    strip = (shape.temporal_patch, 2 * shape.token_px, 3 * shape.token_px, 3)
    assert packing.size_of(strip) == Size(6, 1, 0 if shape.slices_stand_alone else 2)  # windows of 2 by 2 tokens
    assert captured.recorder.captured == [tokens * shape.merge**2 for tokens in (160, 128, 64)]


def test_replays_and_their_padding_are_counted(graphed: Graphed, shape: FamilyUnderTest) -> None:
    names = ("graph_replays", "graph_tokens", "graph_padding_tokens")
    before = [counted(name) for name in names]
    graphed.tower.encode(random_slices([(7, 7)], shape))
    graphed.tower.encode(random_slices([(7, 7), (7, 7)], shape))
    assert graphed.recorder.replayed == [64 * shape.merge**2, 128 * shape.merge**2]
    assert [counted(name) - was for name, was in zip(names, before, strict=True)] == [2, 3 * 49, 15 + 30]


# --- without a graph---------------------------------------------------------------------------------------------


def encode_without(graphed: Graphed, slices: Sequence[Tensor], reason: Eager) -> list[Tensor]:
    """Encodes slices that must not be replayed, counted with this reason only."""
    graphed.recorder.replayed.clear()
    before = {each: counted("eager_forwards", reason=each.value) for each in Eager}
    found = graphed.tower.encode(slices)
    assert not graphed.recorder.replayed
    after = {each: counted("eager_forwards", reason=each.value) for each in Eager}
    assert after == {**before, reason: before[reason] + 1}
    return found


@pytest.mark.parametrize(("sides", "reason"), [([(23, 7)], Eager.TOKENS), ([(1, 1)] * 6, Eager.SLICES)])
def test_a_load_that_fits_no_bucket_runs_without_a_graph(
    graphed: Graphed, shape: FamilyUnderTest, expect: Expect, sides: list[tuple[int, int]], reason: Eager
) -> None:
    slices = random_slices(sides, shape)
    assert_same(encode_without(graphed, slices, reason), expect(slices))


def test_too_many_windows_run_without_a_graph(tiny_checkpoint: Path) -> None:
    """Windows have 2 by 2 tokens: the bucket of 160 tokens holds 80, which strips one token high need."""
    shape, recorder = FAMILIES["qwen2_5_vl"], Recorder()
    graphed = Graphed(with_graphs(load_packed(tiny_checkpoint), MOST_TOKENS, recorder), recorder)
    graphed.tower.encode(random_slices([(1, 32)] * 5, shape))
    assert recorder.replayed[-1] == MOST_TOKENS * shape.merge**2
    encode_without(graphed, random_slices([(1, 32)] * 3 + [(1, 31), (1, 33)], shape), Eager.WINDOWS)


def test_a_replay_that_does_not_pay_is_not_chosen(packed: Tower, shape: FamilyUnderTest, expect: Expect) -> None:
    recorder, slices = Recorder(eager_s=0.5), random_slices([(3, 3)], shape)
    graphed = Graphed(with_graphs(packed, MOST_TOKENS, recorder), recorder)
    assert_same(encode_without(graphed, slices, Eager.PADDING), expect(slices))


def test_a_failed_capture_leaves_the_tower_without_graphs(
    packed: Tower, shape: FamilyUnderTest, expect: Expect
) -> None:
    class Refusal(Recorder):
        def capture(self, inputs: Sequence[Tensor], compute: Callable[[], Tensor]) -> Captured:
            try:
                raise RuntimeError("operation not permitted when stream is capturing")
            finally:
                raise RuntimeError("operation failed due to a previous error during capture")

    recorder, slices = Refusal(), random_slices([(3, 3)], shape)
    with structlog.testing.capture_logs() as logs:
        graphed = Graphed(with_graphs(packed, MOST_TOKENS, recorder), recorder)
    assert [each["error"] for each in logs] == ["operation not permitted when stream is capturing"]
    assert graphed.tower.packing is None
    assert_same(encode_without(graphed, slices, Eager.NONE_CAPTURED), expect(slices))


def test_sdpa_attention_has_no_graphs(family_checkpoint: Path, shape: FamilyUnderTest) -> None:
    recorder, tower = Recorder(), load_tower(Checkpoint(family_checkpoint), "float32", CPU)
    graphed = Graphed(with_graphs(tower, MOST_TOKENS, recorder), recorder)
    assert not recorder.captured
    encode_without(graphed, random_slices([(3, 3)], shape), Eager.NONE_CAPTURED)


# --- times of buckets -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most_tokens", [1, 5, 100])
def test_every_bucket_is_timed(tiny_checkpoint: Path, most_tokens: int) -> None:
    recorder = Recorder(eager_s=3.0)
    forward = with_graphs(load_packed(tiny_checkpoint), most_tokens, recorder).forward
    assert isinstance(forward, TowerGraphs)
    assert [each.bucket.tokens for each in forward.measured] == sorted({min(64, most_tokens), most_tokens})
    assert {(each.replay_s, each.eager_s) for each in forward.measured} == {(1.0, 3.0)}
    assert len(set(recorder.replayed)) == len(forward.measured)


def test_times_are_medians_without_the_first_run(tiny_checkpoint: Path) -> None:
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


def test_a_bucket_is_timed_with_equal_squares_that_fill_it(tiny_checkpoint: Path) -> None:
    """8 tokens per side: 1 in 64 tokens, 2 in 128 and in 160."""
    tower, sides = load_packed(tiny_checkpoint), []
    with patch.object(ModelForward, "__call__", lambda _, patches, given: sides.append(given)):
        with_graphs(tower, 160, Recorder())
    merge = FAMILIES["qwen2_5_vl"].merge
    assert sides[:: len(sides) // 3] == [[(8 * merge, 8 * merge)] * count for count in (1, 2, 2)]
