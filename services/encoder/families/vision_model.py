"""How a vision tower is made of a checkpoint and transformers' class for it.

It knows no family: a family's file says which classes those are, and what of their output is embeddings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from common.checkpoint import Checkpoint
from common.contract.errors import StartupError
from services.encoder.tower.attention import VARLEN, Wanted, find_attention
from services.encoder.tower.cost import TowerSizes
from services.encoder.tower.forward import ModelForward
from services.encoder.tower.packing import Geometry, TowerShape
from services.encoder.tower.patches import FoldedPatchEmbed, PatchShape, read_normalisation
from services.encoder.tower.saturation import saturate
from services.encoder.tower.tower import PATCH_EMBED, Tower, choose_dtype, fill, find_weights, read_weights

# Qwen3-VL's checkpoints have the first, Qwen2.5-VL's published ones the second.
PREFIXES = ("model.visual.", "visual.")


def vision_config(checkpoint: Checkpoint, config_class: Any) -> Any:
    """The tower's part of config.json, as transformers reads it. Raises StartupError if there is none."""
    vision = checkpoint.config.get("vision_config")
    if not isinstance(vision, dict):
        raise StartupError(f"{checkpoint.folder}/config.json has no vision_config")
    config = config_class(**vision)
    config._attn_implementation = "sdpa"
    return config


def make_tower(
    checkpoint: Checkpoint,
    config: Any,
    model_class: Any,
    rotary_class: Any,
    shape: TowerShape,
    keywords: Callable[[Geometry[Tensor]], Mapping[str, Tensor | int | None]],
    levels: Callable[[Any], Tensor],
    embed_levels: int,
    dtype: str,
    device: torch.device,
    attention: Wanted,
    windowed_layers: int = 0,
) -> Tower:
    """A tower that runs `model_class(config)` with the checkpoint's weights.

    rotary_class: of its `rotary_pos_emb`. keywords: the geometry under the names by which the model's forward takes it
    instead of computing it. levels: its output to (1 + embed_levels, P / merge², embed_dim).
    Raises StartupError if the checkpoint's tower is not whole, or cannot have that attention.
    """
    with torch.device("meta"):
        model = model_class(config)
    stored = find_weights(checkpoint, PREFIXES)
    runs_in = choose_dtype(stored, dtype)
    weights = read_weights(stored, runs_in, device)
    fill(model, weights, runs_in)
    # Its frequencies are computed, not stored, and stay float32.
    model.rotary_pos_emb = rotary_class(config)
    model.patch_embed = FoldedPatchEmbed(
        weights[f"{PATCH_EMBED}weight"],
        weights.get(f"{PATCH_EMBED}bias"),
        read_normalisation(checkpoint),
        runs_in,
    )
    if runs_in == torch.float16:
        saturate(model)
    model.eval().requires_grad_(False).to(device)
    heads = config.num_heads
    attend = find_attention(attention, device, runs_in, heads, config.hidden_size // heads)
    extra = {"attend": attend} if attend else {}
    if attend:
        # Not by transformers' setter, which knows no other names with "flash" in them than its own.
        config._attn_implementation_internal = VARLEN

    def compute(patches: Tensor, geometry: Geometry[Tensor]) -> Tensor:
        # Its grids are what the geometry was made of, on the device: all that follows from them is given.
        return levels(model(patches, grid_thw=None, **keywords(geometry), **extra))

    return Tower(
        forward=ModelForward(compute, shape, device, varlen=attend is not None),
        patches=PatchShape(config.patch_size, config.spatial_merge_size, config.temporal_patch_size),
        embed_dim=config.out_hidden_size,
        embed_levels=embed_levels,
        dtype=runs_in,
        device=device,
        sizes=_sizes(model, shape, windowed_layers),
    )


def _sizes(model: Any, shape: TowerShape, windowed_layers: int) -> TowerSizes:
    """Of its matrices those in blocks meet every patch, and so do the embedding's; all others merge."""
    in_blocks, elsewhere = (
        sum(each.weight.numel() for name, each in model.named_modules() if isinstance(each, nn.Linear) and where(name))
        for where in (lambda name: name.startswith("blocks."), lambda name: not name.startswith("blocks."))
    )
    return TowerSizes(
        hidden=model.config.hidden_size,
        patch_weights=in_blocks + model.patch_embed.weight.numel(),
        token_weights=elsewhere,
        full_layers=len(model.blocks) - windowed_layers,
        windowed_layers=windowed_layers,
        window_patches=(shape.window_side * shape.merge) ** 2,
    )
