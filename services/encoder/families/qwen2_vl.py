"""Qwen2-VL's vision tower: transformers' class, and its output. Source: Qwen2-VL, arXiv 2409.12191."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import (
    Qwen2VisionTransformerPretrainedModel,
    Qwen2VLVisionRotaryEmbedding,
)

from framesieve.common.checkpoint import Checkpoint
from framesieve.services.encoder.tower.attention import Wanted
from framesieve.services.encoder.tower.packing import PackedLayout, TowerShape
from framesieve.services.encoder.tower.parallel.division import Share
from framesieve.services.encoder.tower.tower import Tower
from framesieve.services.encoder.tower.vision_model import make_tower, vision_config


def load(
    checkpoint: Checkpoint, dtype: str, device: torch.device, attention: Wanted, share: Share | None = None
) -> Tower:
    """share, and what it raises: see `make_tower`."""
    config = vision_config(checkpoint, Qwen2VLVisionConfig)
    return make_tower(
        checkpoint,
        config,
        Qwen2VisionTransformerPretrainedModel,
        Qwen2VLVisionRotaryEmbedding,
        shape=TowerShape(config.spatial_merge_size),
        keywords=_keywords,
        hidden=config.embed_dim,
        embed_dim=config.hidden_size,
        dtype=dtype,
        device=device,
        attention=attention,
        share=share,
    )


def _keywords(layout: PackedLayout[Tensor]) -> dict[str, Tensor | int | None]:
    return {"position_ids": layout.positions, "cu_seqlens": layout.ends, "max_seqlen": layout.longest}
