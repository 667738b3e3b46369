"""Float16 towers saturate instead of overflowing, and are as accurate as transformers' within the range."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.checkpoint import Checkpoint
from services.encoder.families import load_tower
from tests.encoder.test_tower import encode_all, grid_of, levels_of, pixel_values, processor_of, random_frames
from tests.families import FAMILIES, FamilyUnderTest, load_reference

CPU = torch.device("cpu")
MOST = 65504.0


@pytest.fixture(scope="module")
def shape(family: str) -> FamilyUnderTest:
    return FAMILIES[family]


@pytest.fixture
def copy(family_checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(family_checkpoint, tmp_path / "copy"))


def rewrite(folder: Path, changes: dict[str, Callable[[Tensor], Tensor]]) -> None:
    """Changes the tower's tensors, by the ends of their names."""
    (path,) = folder.glob("*.safetensors")
    weights = load_file(path)
    for ending, change in changes.items():
        (name,) = (each for each in weights if "visual." in each and each.endswith(ending))
        weights[name] = change(weights[name])
    save_file(weights, path, metadata={"format": "pt"})


def add(*thirds: float) -> Callable[[Tensor], Tensor]:
    """Adds a value to each third of the channels."""
    return lambda bias: bias + torch.tensor(thirds).repeat_interleave(-(-bias.shape[-1] // 3))[: bias.shape[-1]]


def theirs(folder: Path, shape: FamilyUnderTest, video: Tensor, tower: Any) -> Tensor:
    with torch.no_grad():
        return levels_of(tower(pixel_values(video, processor_of(folder), shape), grid_thw=grid_of(video, shape)))


def in_range(tower: Any) -> Any:
    """transformers' tower in float32 with residual sums clamped to float16's range."""

    def forward(block: Any, hidden: Tensor, **keywords: Any) -> Tensor:
        hidden = hidden.clamp(-MOST, MOST)
        hidden = (hidden + block.attn(block.norm1(hidden), **keywords)).clamp(-MOST, MOST)
        return (hidden + block.mlp(block.norm2(hidden))).clamp(-MOST, MOST)

    for block in tower.blocks:
        block.forward = MethodType(forward, block)
    return tower


def test_residual_sums_saturate(copy: Path, family: str, shape: FamilyUnderTest) -> None:
    """A third of the channels exceeds the range after a block and within the next, and returns into it."""
    sign = 1 if shape.slices_stand_alone else -1
    last = "linear_fc2" if shape.slices_stand_alone else "down_proj"
    rewrite(
        copy,
        {
            "blocks.0.attn.proj.bias": add(sign * 60000, sign * 20000, 0),
            f"blocks.0.mlp.{last}.bias": add(sign * 60000, 0, 0),
            "blocks.1.attn.proj.bias": add(sign * 60000, 0, 0),
            f"blocks.1.mlp.{last}.bias": add(sign * -40000, 0, 0),
        },
    )
    video = random_frames(4, 4 * shape.token_px, 3 * shape.token_px)
    half = shape.model.from_pretrained(copy, dtype=torch.float16).model.visual
    assert not theirs(copy, shape, video, half).isfinite().all()
    found = encode_all(load_tower(Checkpoint(copy), "float16", CPU), video, shape)
    assert found.dtype == torch.float16
    expected = theirs(copy, shape, video, in_range(load_reference(family, copy).model.visual))
    torch.testing.assert_close(found.float(), expected, atol=2e-2, rtol=1e-2)


def test_sums_with_position_embeddings_saturate(tmp_path: Path) -> None:
    shape = FAMILIES["qwen3_vl"]
    folder = shape.write(tmp_path, 1)
    shifts = {"visual.patch_embed.proj.bias": add(40000, 20000, 0), "visual.pos_embed.weight": add(40000, 0, 0)}
    last, back = "blocks.0.mlp.linear_fc2.bias", add(-40000, 0, 0)
    rewrite(folder, {**shifts, last: back})
    video = random_frames(4, 4 * shape.token_px, 3 * shape.token_px)
    found = encode_all(load_tower(Checkpoint(folder), "float16", CPU), video, shape)
    expected = theirs(folder, shape, video, in_range(load_reference("qwen3_vl", folder).model.visual))
    torch.testing.assert_close(found.float(), expected, atol=2e-2, rtol=1e-2)


def test_patch_embeddings_saturate(tmp_path: Path) -> None:
    """Before position embeddings are added, which bring some values back into the range."""
    shape = FAMILIES["qwen3_vl"]
    folder = shape.write(tmp_path, 1)
    rewrite(
        folder,
        {
            "visual.patch_embed.proj.weight": lambda weight: weight * (100000 / weight[0].norm()),
            "visual.pos_embed.weight": add(-40000, 40000, 0),
        },
    )
    video = random_frames(4, 4 * shape.token_px, 3 * shape.token_px)
    found = encode_all(load_tower(Checkpoint(folder), "float16", CPU), video, shape)
    reference = in_range(load_reference("qwen3_vl", folder).model.visual)
    past = []

    def clamp(module: Any, given: Any, returned: Tensor) -> Tensor:
        past.append(float((returned.abs() > MOST).float().mean()))
        return returned.clamp(-MOST, MOST)

    reference.patch_embed.register_forward_hook(clamp)
    expected = theirs(folder, shape, video, reference)
    assert 0.05 < past[0] < 0.5
    torch.testing.assert_close(found.float(), expected, atol=2e-2, rtol=1e-2)


@pytest.mark.parametrize(
    ("ending", "change"),
    [
        ("mlp.{first}.weight", lambda weight: weight * 1e5),
        ("attn.qkv.weight", lambda weight: weight * 1e5),
        ("attn.qkv.bias", lambda bias: bias + 60000),  # rotating pairs of such values makes one of them larger
        ("norm1.weight", lambda weight: weight * 1e5),
        ("attn.proj.weight", lambda weight: weight * 1e9),  # beyond float16 itself
    ],
)
def test_overflows_within_a_layer_stay_finite(
    copy: Path, shape: FamilyUnderTest, ending: str, change: Callable[[Tensor], Tensor]
) -> None:
    first = "linear_fc1" if shape.slices_stand_alone else "gate_proj"
    rewrite(copy, {f"blocks.1.{ending.format(first=first)}": change})
    video = random_frames(4, 4 * shape.token_px, 3 * shape.token_px)
    half = shape.model.from_pretrained(copy, dtype=torch.float16).model.visual
    assert not theirs(copy, shape, video, half).isfinite().all()
    assert encode_all(load_tower(Checkpoint(copy), "float16", CPU), video, shape).isfinite().all()


def test_values_that_are_not_turned_reach_as_far_as_float16(copy: Path, family: str, shape: FamilyUnderTest) -> None:
    """Beside what else is added to a third of the channels, it shows how large they are."""
    rewrite(copy, {"blocks.0.attn.proj.bias": add(20000, 0, 0), "blocks.0.attn.qkv.bias": add(0, 0, 60000)})
    video = random_frames(4, 4 * shape.token_px, 3 * shape.token_px)
    found = encode_all(load_tower(Checkpoint(copy), "float16", CPU), video, shape)
    expected = theirs(copy, shape, video, in_range(load_reference(family, copy).model.visual))
    torch.testing.assert_close(found.float(), expected, atol=2e-2, rtol=1e-2)


def test_float16_is_as_accurate_as_transformers_within_the_range(
    family: str, family_checkpoint: Path, shape: FamilyUnderTest
) -> None:
    video = random_frames(4, 4 * shape.token_px, 4 * shape.token_px)
    exact = theirs(family_checkpoint, shape, video, load_reference(family, family_checkpoint).model.visual)
    half = shape.model.from_pretrained(family_checkpoint, dtype=torch.float16).model.visual
    found = encode_all(load_tower(Checkpoint(family_checkpoint), "float16", CPU), video, shape)
    ours, other = (
        (each.float() - exact).abs().mean((1, 2)) for each in (found, theirs(family_checkpoint, shape, video, half))
    )
    assert (ours < 1.2 * other).all()
