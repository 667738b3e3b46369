"""Qwen2.5-VL's vision tower: transformers' class, its weights, its shape. Source: Qwen2.5-VL, arXiv 2502.13923."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
    Qwen2_5_VLVisionRotaryEmbedding,
)

from common.checkpoint import Checkpoint
from common.errors import StartupError
from services.encoder.patches import FoldedPatchEmbed, PatchShape, read_normalisation
from services.encoder.tower import Tower, choose_dtype, fill, read_weights

# transformers 5 writes the first; the published checkpoints have the second.
PREFIXES = ("model.visual.", "visual.")


def load(checkpoint: Checkpoint, dtype: str, device: torch.device) -> Tower:
    """Raises StartupError if the checkpoint's tower is not whole."""
    config = _config(checkpoint)
    with torch.device("meta"):
        model: Any = Qwen2_5_VisionTransformerPretrainedModel(config)
    weights = read_weights(checkpoint, PREFIXES)
    runs_in = choose_dtype(weights, dtype)
    fill(model, weights, runs_in)
    # Its frequencies are computed, not stored, and stay float32.
    model.rotary_pos_emb = Qwen2_5_VLVisionRotaryEmbedding(config)
    model.patch_embed = FoldedPatchEmbed(weights["patch_embed.proj.weight"], read_normalisation(checkpoint), runs_in)
    model.eval().requires_grad_(False).to(device)

    def forward(patches: Tensor, grids: Tensor) -> Tensor:
        embeds: Tensor = model(patches, grid_thw=grids).pooler_output
        return embeds[None]

    return Tower(
        forward=forward,
        patches=PatchShape(config.patch_size, config.spatial_merge_size, config.temporal_patch_size),
        embed_dim=config.out_hidden_size,
        embed_levels=0,
        dtype=runs_in,
        device=device,
    )


def _config(checkpoint: Checkpoint) -> Any:
    vision = checkpoint.config.get("vision_config")
    if not isinstance(vision, dict):
        raise StartupError(f"{checkpoint.folder}/config.json has no vision_config")
    config: Any = Qwen2_5_VLVisionConfig(**vision)
    config._attn_implementation = "sdpa"
    return config
