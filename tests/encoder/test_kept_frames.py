"""The tower over tokens that were chosen before it equals transformers' layers over these alone, whatever is beside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import Tensor

from demo.checkpoint import TINY, write_checkpoint
from gridsieve.common.checkpoint import Checkpoint
from gridsieve.services.encoder.startup.build import compile_tower
from gridsieve.services.encoder.tower.graph_buckets import Eager
from gridsieve.services.encoder.tower.graphs import with_graphs
from gridsieve.services.encoder.tower.loading import load_tower
from gridsieve.services.encoder.tower.patches import Frames, KeptFrames
from gridsieve.services.encoder.tower.tower import Tower
from tests.encoder.conftest import QWEN_PARAMS
from tests.encoder.test_graphs import Graphed, assert_same, encode_in_batches, encode_without
from tests.encoder.test_tower import CPU, frames_of, reference_embeds
from tests.encoder.tower_recorder import Recorder, load_packed
from tests.families import FAMILIES, FamilyUnderTest, load_reference, vision_of
from tests.vision import kept_embeds, patches_of

MOST_TOKENS = 160


@pytest.fixture(scope="session", params=[*QWEN_PARAMS, "cosmos3_edge", "glm4v"])
def family(request: pytest.FixtureRequest) -> str:
    """Qwen3-VL-MoE's tower is Qwen3-VL's."""
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def reference(family: str, family_checkpoint: Path) -> Any:
    return vision_of(load_reference(family, family_checkpoint))


@pytest.fixture(scope="module")
def tower(family_checkpoint: Path) -> Tower:
    return load_tower(Checkpoint(family_checkpoint), "float32", CPU)


@pytest.fixture(scope="module")
def graphed(family_checkpoint: Path) -> tuple[Tower, Recorder]:
    recorder = Recorder()
    return with_graphs(load_packed(family_checkpoint), MOST_TOKENS, recorder), recorder


def cut(frames: Tensor, kept: Sequence[int], side: int) -> Tensor:
    """The squares of tokens, one below the other."""
    columns = frames.shape[2] // side
    squares = [(token // columns * side, token % columns * side) for token in kept]
    return torch.cat([frames[:, y : y + side, x : x + side] for y, x in squares], dim=1)


def kept_frames(frames: Tensor, kept: Sequence[int], side: int) -> KeptFrames:
    grid = frames.shape[1] // side, frames.shape[2] // side
    return KeptFrames(cut(frames, kept, side), grid, tuple(kept))


# Frames, rows, columns, and which tokens are kept; None: the slice is whole.
Asked = tuple[int, int, int, list[int] | None]


@st.composite
def asked_slices(draw: st.DrawFn) -> Asked:
    frames, rows, columns = draw(st.integers(1, 2)), draw(st.integers(1, 7)), draw(st.integers(1, 7))
    tokens = rows * columns
    some = st.sets(st.integers(0, tokens - 1), min_size=1).map(sorted)
    few = st.sets(st.integers(0, tokens - 1), min_size=1, max_size=3).map(sorted)
    return frames, rows, columns, draw(st.none() | few | some | st.just(list(range(tokens))))


def given_and_expected(
    asked: Sequence[Asked], reference: Any, folder: Path, shape: FamilyUnderTest
) -> tuple[list[Frames], list[Tensor]]:
    found: list[Frames] = []
    expected = []
    for seed, (count, rows, columns, kept) in enumerate(asked):
        frames = frames_of(1, rows, columns, shape, seed)[:count]
        found.append(frames if kept is None else kept_frames(frames, kept, shape.token_px))
        patches = patches_of(frames.numpy(), folder, shape)
        whole = range(rows * columns)
        expected.append(kept_embeds(reference, patches, (rows, columns), whole if kept is None else kept, shape))
    return found, expected


def test_the_reference_over_all_tokens_is_transformers_tower(
    reference: Any, family_checkpoint: Path, shape: FamilyUnderTest
) -> None:
    for rows, columns in ((5, 3), (1, 4), (6, 7)):
        frames = frames_of(1, rows, columns, shape)
        patches = patches_of(frames.numpy(), family_checkpoint, shape)
        ours = kept_embeds(reference, patches, (rows, columns), range(rows * columns), shape)
        expected = reference_embeds(reference, family_checkpoint, frames, shape)
        torch.testing.assert_close(ours, expected, atol=2e-6, rtol=0)


@settings(max_examples=12)
@given(asked=st.lists(asked_slices(), min_size=1, max_size=5))
def test_kept_tokens_see_each_other_alone(
    tower: Tower, reference: Any, family_checkpoint: Path, shape: FamilyUnderTest, asked: list[Asked]
) -> None:
    slices, expected = given_and_expected(asked, reference, family_checkpoint, shape)
    assert_same(tower.encode(slices), expected)


@settings(max_examples=8)
@given(asked=st.lists(asked_slices(), min_size=1, max_size=7))
def test_replays_encode_kept_tokens_and_their_sizes_are_those_of_their_layouts(
    graphed: tuple[Tower, Recorder],
    reference: Any,
    family_checkpoint: Path,
    shape: FamilyUnderTest,
    asked: list[Asked],
) -> None:
    """A layout larger than its size would not fit into the bucket that it chose."""
    captured, recorder = graphed
    recorder.replayed.clear()
    slices, expected = given_and_expected(asked, reference, family_checkpoint, shape)
    assert_same(encode_in_batches(captured, slices), expected)
    event(f"replayed: {bool(recorder.replayed)}")


def test_a_quarter_of_the_tokens_spread_over_all_windows_is_replayed_and_fewer_are_not(tmp_path: Path) -> None:
    """Windows have 3 by 3 tokens: the bucket of 160 tokens holds 72 of them."""
    shape, recorder = FAMILIES["qwen2_5_vl"], Recorder()
    packed = load_packed(write_checkpoint(tmp_path, replace(TINY, window_px=3 * shape.token_px), seed=1))
    graphed = Graphed(with_graphs(packed, MOST_TOKENS, recorder), recorder)
    for side, step, replayed in ((24, 2, True), (27, 3, False)):
        kept = [side * row + column for row in range(0, side, step) for column in range(0, side, step)]
        slices = [kept_frames(frames_of(1, side, side, shape), kept, shape.token_px)]
        if replayed:
            recorder.replayed.clear()
            graphed.tower.encode(slices)
            assert recorder.replayed == [MOST_TOKENS * shape.merge**2]
        else:
            encode_without(graphed, slices, Eager.WINDOWS)


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own code
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "glm4v"], indirect=True)
def test_a_compiled_tower_encodes_slices_and_kept_tokens_and_compiles_nothing_after_the_start(
    reference: Any, family_checkpoint: Path, shape: FamilyUnderTest
) -> None:
    tower = load_tower(Checkpoint(family_checkpoint), "float32", CPU)
    assert compile_tower(tower)
    torch.compiler.set_stance("fail_on_recompile")
    for asked in ([(2, 5, 6, [3])], [(2, 1, 1, None)], [(2, 5, 6, [0, 7, 8, 29]), (1, 3, 3, None), (2, 1, 7, [1, 6])]):
        slices, expected = given_and_expected(asked, reference, family_checkpoint, shape)
        assert_same(tower.encode(slices), expected)
