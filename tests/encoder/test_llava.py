"""CLIP, SigLIP and Pixtral towers with every selection of features, against transformers' `get_image_features`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlavaForConditionalGeneration

from common.checkpoint import Checkpoint
from common.contract.errors import StartupError
from services.encoder.families import load_tower
from services.encoder.tower.graphs import with_graphs
from tests.encoder.tower_recorder import Recorder, load_packed
from tests.families import LLAVA, LLAVA_PROCESSORS
from tests.generation.checkpoints import changed

CPU = torch.device("cpu")
# Outputs of a tower of three layers: 0 is its embedding.
LAYERS: list[Any] = [-1, -2, 1, 3, [0, 3], [-1, 2, -4]]
SELECTIONS = [(kind, layers) for kind in LLAVA for layers in LAYERS]


def frames_of(kind: str) -> list[Tensor]:
    """Two frames of the sizes that the tower takes: all of one size, but of any in patches of Pixtral's."""
    side = LLAVA[kind]["vision_config"]["image_size"]
    sizes = [(32, 48), (96, 8), (32, 48)] if kind == "llava_pixtral" else [(side, side)] * 3
    random = torch.Generator().manual_seed(0)
    return [torch.randint(0, 255, (1, *size, 3), dtype=torch.uint8, generator=random) for size in sizes]


@torch.no_grad()
def reference(folder: Path, kind: str, frames: Sequence[Tensor]) -> list[Tensor]:
    """Each frame's features by transformers, of normalised float32 pixels."""
    model = LlavaForConditionalGeneration.from_pretrained(folder, attn_implementation="eager").model.eval()
    settings = LLAVA_PROCESSORS[kind]
    mean, std = (torch.tensor(settings[name]) for name in ("image_mean", "image_std"))
    found = []
    for each in frames:
        pixels = ((each / 255 - mean) / std).permute(0, 3, 1, 2)
        sizes = {"image_sizes": torch.tensor([pixels.shape[2:]])} if kind == "llava_pixtral" else {}
        found += model.get_image_features(pixels, return_dict=True, **sizes).pooler_output
    return found


def selecting(folder: Path, to: Path, kind: str, layers: Any, strategy: str) -> Path:
    """A copy whose projector takes the outputs of these layers."""
    count = len(layers) if isinstance(layers, list) else 1

    def widen(weights: dict[str, Tensor]) -> None:
        name = "multi_modal_projector.linear_1.weight"
        random = torch.Generator().manual_seed(1)
        hidden = LLAVA[kind]["vision_config"]["hidden_size"]
        weights[name] = 0.1 * torch.randn(len(weights[name]), count * hidden, generator=random)

    fields = {"vision_feature_layer": layers, "vision_feature_select_strategy": strategy}
    return changed(folder, to, widen, **fields)


@pytest.mark.parametrize(("kind", "layers"), SELECTIONS, ids=str)
def test_each_selection_of_layers_equals_transformers(
    checkpoints: Callable[[str], Path], tmp_path: Path, kind: str, layers: Any
) -> None:
    strategies = ["full"] if kind == "llava_pixtral" else ["full", "default"]  # Pixtral's refuses the other
    for strategy in strategies:
        folder = selecting(checkpoints(kind), tmp_path / strategy, kind, layers, strategy)
        frames = frames_of(kind)
        found = load_tower(Checkpoint(folder), "float32", CPU).encode(frames)
        for ours, theirs in zip(found, reference(folder, kind, frames), strict=True):
            torch.testing.assert_close(ours[0], theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", LLAVA)
def test_graphs_replay_what_the_tower_computes(checkpoints: Callable[[str], Path], kind: str) -> None:
    tower, recorder, frames = load_packed(checkpoints(kind)), Recorder(), frames_of(kind)
    graphed = with_graphs(tower, 160, recorder)
    recorder.replayed.clear()
    for ours, theirs in zip(graphed.encode(frames), tower.encode(frames), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=0)
    assert recorder.replayed


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"vision_feature_layer": 4}, "vision_feature_layer .* lacks"),
        ({"vision_feature_layer": [-5, 1]}, "vision_feature_layer .* lacks"),
        ({"vision_config": {"model_type": "dinov2"}}, "'dinov2' is not supported, only clip_vision_model"),
    ],
)
def test_a_tower_that_cannot_be_made_is_refused(
    checkpoints: Callable[[str], Path], tmp_path: Path, fields: dict[str, Any], why: str
) -> None:
    folder = changed(checkpoints("llava"), tmp_path / "other", **fields)
    with pytest.raises(StartupError, match=why):
        load_tower(Checkpoint(folder), "float32", CPU)


def test_float16_is_refused(checkpoints: Callable[[str], Path]) -> None:
    with pytest.raises(StartupError, match="--dtype float16: clip_vision_model towers"):
        load_tower(Checkpoint(checkpoints("llava")), "float16", CPU)


def test_weights_that_are_missing_are_named(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    name = "vision_tower.encoder.layers.0.mlp.fc1.weight"
    folder = changed(checkpoints("llava"), tmp_path / "other", lambda weights: weights.pop(name))
    assert json.loads((folder / "config.json").read_text())["vision_feature_layer"] == -2
    with pytest.raises(StartupError, match=f"lacks {name}"):
        load_tower(Checkpoint(folder), "float32", CPU)
