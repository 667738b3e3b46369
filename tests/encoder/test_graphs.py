"""Graph replays compute what transformers' tower computes, and which forwards are replayed.

Without CUDA: graphs are recorded by `tower_recorder.Recorder`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import structlog
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import REGISTRY
from torch import Tensor

from gridsieve.services.compute.graphs import Captured
from gridsieve.services.encoder.tower.graph_buckets import Eager, Size, fitting
from gridsieve.services.encoder.tower.graphs import with_graphs
from gridsieve.services.encoder.tower.patches import Frames
from gridsieve.services.encoder.tower.tower import Tower
from tests.encoder.test_tower import frames_of, reference_embeds
from tests.encoder.tower_recorder import Recorder, load_packed
from tests.families import FAMILIES, FamilyUnderTest, load_reference, vision_of

MOST_TOKENS = 160
Expect = Callable[[Sequence[Tensor]], list[Tensor]]


@dataclass(frozen=True)
class Graphed:
    tower: Tower
    recorder: Recorder


def graphed_of(tower: Tower, recorder: Recorder) -> Graphed:
    return Graphed(with_graphs(tower, MOST_TOKENS, recorder), recorder)


@pytest.fixture(scope="module")
def captured(family_checkpoint: Path) -> Graphed:
    return graphed_of(load_packed(family_checkpoint), Recorder())


@pytest.fixture
def graphed(captured: Graphed) -> Graphed:
    """With an empty record of replays."""
    captured.recorder.replayed.clear()
    return captured


@pytest.fixture(scope="module")
def expect(family: str, family_checkpoint: Path, shape: FamilyUnderTest) -> Expect:
    """Embeddings from transformers' tower, with its own attention, of each slice alone."""
    reference = vision_of(load_reference(family, family_checkpoint))
    return lambda slices: [reference_embeds(reference, family_checkpoint, frames, shape) for frames in slices]


def slices_of(sides: Sequence[tuple[int, int]], shape: FamilyUnderTest) -> list[Tensor]:
    return [frames_of(1, rows, columns, shape, seed) for seed, (rows, columns) in enumerate(sides)]


def encode_in_batches(tower: Tower, slices: Sequence[Frames]) -> list[Tensor]:
    assert tower.packing is not None
    found: list[Tensor] = []
    while len(found) < len(slices):
        left = slices[len(found) :]
        count = fitting([tower.packing.size_of(frames) for frames in left], tower.packing.largest)
        found += tower.encode(left[:count])
    return found


def assert_same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def counted(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"gridsieve_encoder_{name}_total", labels) or 0.0


@settings(max_examples=8, deadline=None)
@given(sides=st.lists(st.tuples(st.integers(1, 7), st.integers(1, 7)), min_size=1, max_size=7))
def test_replays_equal_transformers_tower(
    captured: Graphed, shape: FamilyUnderTest, expect: Expect, sides: list[tuple[int, int]]
) -> None:
    captured.recorder.replayed.clear()
    slices = slices_of(sides, shape)
    # The first results must survive the later replays.
    found = encode_in_batches(captured.tower, slices) + encode_in_batches(captured.tower, slices[::-1])
    assert captured.recorder.replayed
    expected = expect(slices)
    assert_same(found, expected + expected[::-1])


def test_buckets_are_captured_largest_first_and_limit_a_forward(captured: Graphed, shape: FamilyUnderTest) -> None:
    packing = captured.tower.packing
    assert packing is not None
    assert (packing.largest.tokens, packing.largest.slices) == (160, 8)
    strip = torch.empty(shape.temporal_patch, 2 * shape.token_px, 3 * shape.token_px, 3, dtype=torch.uint8)
    assert packing.size_of(strip) == Size(6, 1, 0 if shape.slices_stand_alone else 2, 6)  # windows of 2 by 2 tokens
    assert captured.recorder.captured == [tokens * shape.merge**2 for tokens in (160, 128, 64)]


def test_replays_and_their_padding_are_counted(graphed: Graphed, shape: FamilyUnderTest) -> None:
    names = ("graph_replays", "graph_tokens", "graph_padding_tokens")
    before = [counted(name) for name in names]
    graphed.tower.encode(slices_of([(7, 7)], shape))
    graphed.tower.encode(slices_of([(7, 7), (7, 7)], shape))
    assert graphed.recorder.replayed == [64 * shape.merge**2, 128 * shape.merge**2]
    assert [counted(name) - was for name, was in zip(names, before, strict=True)] == [2, 3 * 49, 15 + 30]


def encode_without(graphed: Graphed, slices: Sequence[Frames], reason: Eager) -> list[Tensor]:
    """Encodes slices that must not be replayed, counted with this reason only."""
    graphed.recorder.replayed.clear()
    before = {each: counted("eager_forwards", reason=each.value) for each in Eager}
    found = graphed.tower.encode(slices)
    assert not graphed.recorder.replayed
    after = {each: counted("eager_forwards", reason=each.value) for each in Eager}
    assert after == {**before, reason: before[reason] + 1}
    return found


@pytest.mark.parametrize(("sides", "reason"), [([(23, 7)], Eager.TOKENS), ([(1, 1)] * 9, Eager.SLICES)])
def test_a_load_that_fits_no_bucket_runs_without_a_graph(
    graphed: Graphed, shape: FamilyUnderTest, expect: Expect, sides: list[tuple[int, int]], reason: Eager
) -> None:
    slices = slices_of(sides, shape)
    assert_same(encode_without(graphed, slices, reason), expect(slices))


def test_slices_of_more_than_256_tokens_are_replayed_if_there_are_few(levels_checkpoint: Path) -> None:
    """Buckets of 320 tokens hold 10 slices of up to 256 tokens, or 8 of any length."""
    shape, tower, recorder = FAMILIES["qwen3_vl"], load_packed(levels_checkpoint), Recorder()
    graphed = Graphed(with_graphs(tower, 320, recorder), recorder)
    long, many = slices_of([(16, 17), (1, 3)], shape), slices_of([(2, 8)] * 10, shape)
    assert_same(graphed.tower.encode(long) + graphed.tower.encode(many), tower.encode(long) + tower.encode(many))
    assert graphed.recorder.replayed[-2:] == [320 * shape.merge**2] * 2
    encode_without(graphed, slices_of([(16, 17)] + [(1, 1)] * 8, shape), Eager.LONGEST)


def test_a_replay_that_does_not_pay_is_not_chosen(levels_checkpoint: Path) -> None:
    graphed = graphed_of(load_packed(levels_checkpoint), Recorder(eager_s=0.5))
    encode_without(graphed, slices_of([(3, 3)], FAMILIES["qwen3_vl"]), Eager.PADDING)


def test_a_failed_capture_leaves_the_tower_without_graphs(levels_checkpoint: Path) -> None:
    class Refusal(Recorder):
        def __call__(self, inputs: Sequence[Tensor], compute: Callable[[], Tensor]) -> Captured:
            try:
                raise RuntimeError("operation not permitted when stream is capturing")
            finally:
                raise RuntimeError("operation failed due to a previous error during capture")

    with structlog.testing.capture_logs() as logs:
        graphed = graphed_of(load_packed(levels_checkpoint), Refusal())
    assert [each["error"] for each in logs] == ["operation not permitted when stream is capturing"]
    assert graphed.tower.packing is None
    encode_without(graphed, slices_of([(3, 3)], FAMILIES["qwen3_vl"]), Eager.NONE_CAPTURED)


def test_sdpa_attention_has_no_graphs(tower: Tower) -> None:
    graphed = graphed_of(tower, Recorder())
    assert not graphed.recorder.captured
    encode_without(graphed, slices_of([(3, 3)], FAMILIES["qwen3_vl"]), Eager.NONE_CAPTURED)
