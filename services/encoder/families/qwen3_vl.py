"""Qwen3-VL's vision tower, of dense and mixture-of-experts models: transformers' class, and its output.

Level 0 is the embedding; each further level is a deepstack feature, in the order of the text model's layers.
Source: Qwen3-VL, arXiv 2511.21631, and deepstack, arXiv 2406.04334.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel, Qwen3VLVisionRotaryEmbedding

from framesieve.common.checkpoint import Checkpoint
from framesieve.services.encoder.tower.packing import PackedLayout, TowerShape
from framesieve.services.encoder.tower.tower import Tower
from framesieve.services.encoder.tower.vision_model import RunOptions, make_tower, vision_config


def load(checkpoint: Checkpoint, options: RunOptions) -> Tower:
    """What it raises: see `make_tower`."""
    return tower_of(checkpoint, vision_config(checkpoint, Qwen3VLVisionConfig), options)


def tower_of(checkpoint: Checkpoint, config: Qwen3VLVisionConfig, options: RunOptions) -> Tower:
    """The tower with this config. What it raises: see `make_tower`."""
    return make_tower(
        checkpoint,
        config,
        Qwen3VLVisionModel,
        Qwen3VLVisionRotaryEmbedding,
        shape=TowerShape(config.spatial_merge_size, table_side=math.isqrt(config.num_position_embeddings)),
        keywords=_keywords,
        levels=_levels,
        embed_levels=len(config.deepstack_visual_indexes),
        hidden=config.hidden_size,
        embed_dim=config.out_hidden_size,
        options=options,
    )


def _keywords(layout: PackedLayout[Tensor]) -> dict[str, Tensor | int | None]:
    return {
        "interp_indices": layout.interpolation_indices,
        "interp_weights": layout.interpolation_weights,
    }


def _levels(output: Any) -> Tensor:
    return torch.stack([output.pooler_output, *output.deepstack_features])
