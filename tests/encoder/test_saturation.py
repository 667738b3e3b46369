"""Float16 towers saturate instead of overflowing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.services.encoder.tower.loading import load_tower
from tests.encoder.test_kept_frames import kept_frames
from tests.encoder.test_tower import encode_all, frames_of, reference_embeds
from tests.families import FAMILIES, FamilyUnderTest, load_reference
from tests.generation.checkpoints import changed
from tests.vision import kept_embeds, patches_of

MOST = 65504.0
Changes = dict[str, Callable[[Tensor], Tensor]]


def with_weights(folder: Path, to: Path, changes: Changes) -> Path:
    """A copy with changes to the tower's tensors, by the ends of their names."""

    def change(weights: dict[str, Tensor]) -> None:
        for ending, make in changes.items():
            (name,) = (each for each in weights if "visual." in each and each.endswith(ending))
            weights[name] = make(weights[name])

    return changed(folder, to / "copy", change)


def add(*thirds: float) -> Callable[[Tensor], Tensor]:
    """Adds a value to each third of the channels."""
    return lambda bias: bias + torch.tensor(thirds).repeat_interleave(-(-bias.shape[-1] // 3))[: bias.shape[-1]]


def encoded(folder: Path, shape: FamilyUnderTest) -> Tensor:
    return encode_all(load_tower(Checkpoint(folder), "float16", torch.device("cpu")), frames_of(2, 4, 3, shape), shape)


def overflows_in_transformers(folder: Path, shape: FamilyUnderTest) -> bool:
    half = shape.model.from_pretrained(folder, dtype=torch.float16).model.visual
    return not bool(reference_embeds(half, folder, frames_of(2, 4, 3, shape), shape).isfinite().all())


def check_saturates(folder: Path, family: str, shape: FamilyUnderTest) -> None:
    """Compares with transformers' tower in float32 whose sums are clamped to float16's range: whole slices, and one of
    which some tokens were chosen."""

    def forward(block: Any, hidden: Tensor, **keywords: Any) -> Tensor:
        hidden = hidden.clamp(-MOST, MOST)
        hidden = (hidden + block.attn(block.norm1(hidden), **keywords)).clamp(-MOST, MOST)
        return (hidden + block.mlp(block.norm2(hidden))).clamp(-MOST, MOST)

    reference = load_reference(family, folder).model.visual
    reference.patch_embed.register_forward_hook(lambda module, given, returned: returned.clamp(-MOST, MOST))
    for block in reference.blocks:
        block.forward = MethodType(forward, block)
    expected = reference_embeds(reference, folder, frames_of(2, 4, 3, shape), shape)
    torch.testing.assert_close(encoded(folder, shape).float(), expected, atol=2e-2, rtol=1e-2)
    frames, kept = frames_of(1, 4, 3, shape), [1, 2, 6, 11]
    expected = kept_embeds(reference, patches_of(frames.numpy(), folder, shape), (4, 3), kept, shape)
    tower = load_tower(Checkpoint(folder), "float16", torch.device("cpu"))
    (found,) = tower.encode([kept_frames(frames, kept, shape.token_px)])
    torch.testing.assert_close(found.float(), expected, atol=2e-2, rtol=1e-2)


def test_residual_sums_saturate(family_checkpoint: Path, tmp_path: Path, family: str, shape: FamilyUnderTest) -> None:
    """A third of the channels exceeds the range after a block and within the next, and returns into it."""
    sign = 1 if shape.slices_stand_alone else -1
    last = "linear_fc2" if shape.slices_stand_alone else "down_proj"
    changes = {
        "blocks.0.attn.proj.bias": add(sign * 60000, sign * 20000, 0),
        f"blocks.0.mlp.{last}.bias": add(sign * 60000, 0, 0),
        "blocks.1.attn.proj.bias": add(sign * 60000, 0, 0),
        f"blocks.1.mlp.{last}.bias": add(sign * -40000, 0, 0),
    }
    copy = with_weights(family_checkpoint, tmp_path, changes)
    assert overflows_in_transformers(copy, shape)
    check_saturates(copy, family, shape)


@pytest.mark.parametrize(
    "changes",
    [
        {  # sums with position embeddings
            "visual.patch_embed.proj.bias": add(40000, 20000, 0),
            "visual.pos_embed.weight": add(40000, 0, 0),
            "blocks.0.mlp.linear_fc2.bias": add(-40000, 0, 0),
        },
        {  # patch embeddings, before position embeddings bring some values back into the range
            "visual.patch_embed.proj.weight": lambda weight: weight * (100000 / weight[0].norm()),
            "visual.pos_embed.weight": add(-40000, 40000, 0),
        },
    ],
)
def test_the_input_of_the_first_block_saturates(levels_checkpoint: Path, tmp_path: Path, changes: Changes) -> None:
    check_saturates(with_weights(levels_checkpoint, tmp_path, changes), "qwen3_vl", FAMILIES["qwen3_vl"])


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
    family_checkpoint: Path,
    tmp_path: Path,
    shape: FamilyUnderTest,
    ending: str,
    change: Callable[[Tensor], Tensor],
) -> None:
    first = "linear_fc1" if shape.slices_stand_alone else "gate_proj"
    copy = with_weights(family_checkpoint, tmp_path, {f"blocks.1.{ending.format(first=first)}": change})
    assert overflows_in_transformers(copy, shape)
    assert encoded(copy, shape).isfinite().all()


def test_attention_values_use_the_whole_range_of_float16(
    family_checkpoint: Path, tmp_path: Path, family: str, shape: FamilyUnderTest
) -> None:
    """Unlike queries and keys, which are clamped to a smaller value. The bias of a third of the channels reveals it."""
    changes = {"blocks.0.attn.proj.bias": add(20000, 0, 0), "blocks.0.attn.qkv.bias": add(0, 0, 60000)}
    check_saturates(with_weights(family_checkpoint, tmp_path, changes), family, shape)
