"""How many operations models take, multiplications and additions counted apart, by the sizes in their configs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.generation.families.language_model import LanguageModel


def prefill_operations(model: LanguageModel, tokens: int) -> float:
    """Of one prefill: every weight of every layer twice a token, the output layer's twice, and causal attention."""
    config: Any = model.text.config
    hidden, heads = config.hidden_size, config.num_attention_heads
    attention = (2 * heads + 2 * model.kv_heads) * model.head_dim * hidden
    weights = model.layers * (attention + 3 * hidden * config.intermediate_size)
    quadratic = 2 * tokens**2 * heads * model.head_dim * model.layers
    return float(2 * tokens * weights + quadratic + 2 * hidden * config.vocab_size)


def tower_operations(vision: Any, slice_patches: Sequence[int]) -> float:
    """Of one forward of Qwen2.5-VL's tower over temporal slices of so many patches each.

    vision: its config. Every weight twice a patch, the merger's twice a token, attention within slices in the layers
    of `fullatt_block_indexes` and within windows in the others.
    """
    patches, hidden, merge = sum(slice_patches), vision.hidden_size, vision.spatial_merge_size**2
    embedding = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2 * hidden
    layer = 4 * hidden**2 + 3 * hidden * vision.intermediate_size
    merger = merge * hidden * (merge * hidden + vision.out_hidden_size) / merge
    full = len(vision.fullatt_block_indexes)
    window = (vision.window_size // vision.patch_size) ** 2
    seen = full * sum(each**2 for each in slice_patches) + (vision.depth - full) * patches * window
    return float(2 * patches * (embedding + vision.depth * layer + merger) + 4 * hidden * seen)
