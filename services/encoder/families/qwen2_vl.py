"""Qwen2-VL's vision tower: transformers' class, and its output. Source: Qwen2-VL, arXiv 2409.12191."""

from __future__ import annotations

from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import (
    Qwen2VisionTransformerPretrainedModel,
    Qwen2VLVisionRotaryEmbedding,
)

from framesieve.common.checkpoint import Checkpoint
from framesieve.services.encoder.tower.packing import TowerShape
from framesieve.services.encoder.tower.tower import Tower
from framesieve.services.encoder.tower.vision_model import RunOptions, make_tower, vision_config


def load(checkpoint: Checkpoint, options: RunOptions) -> Tower:
    """What it raises: see `make_tower`."""
    config = vision_config(checkpoint, Qwen2VLVisionConfig)
    return make_tower(
        checkpoint,
        config,
        Qwen2VisionTransformerPretrainedModel,
        Qwen2VLVisionRotaryEmbedding,
        shape=TowerShape(config.spatial_merge_size),
        hidden=config.embed_dim,
        embed_dim=config.hidden_size,
        options=options,
    )
