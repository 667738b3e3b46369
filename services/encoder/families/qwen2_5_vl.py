"""Qwen2.5-VL's vision tower: transformers' class, and its output. Source: Qwen2.5-VL, arXiv 2502.13923."""

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
from services.encoder.families.vision_model import Windows, make_tower, vision_config
from services.encoder.tower import Tower


def load(checkpoint: Checkpoint, dtype: str, device: torch.device) -> Tower:
    """Raises StartupError if the checkpoint's tower is not whole."""
    config = vision_config(checkpoint, Qwen2_5_VLVisionConfig)
    return make_tower(
        checkpoint,
        config,
        Qwen2_5_VisionTransformerPretrainedModel,
        Qwen2_5_VLVisionRotaryEmbedding,
        levels=_levels,
        embed_levels=0,
        dtype=dtype,
        device=device,
        windows=_windows(config),
    )


def _windows(config: Any) -> Windows:
    side_tokens = config.window_size // config.spatial_merge_size // config.patch_size
    layers = config.depth - len(config.fullatt_block_indexes)
    return Windows(layers, (side_tokens * config.spatial_merge_size) ** 2)


def _levels(output: Any) -> Tensor:
    embeds: Tensor = output.pooler_output
    return embeds[None]
