"""Qwen2.5-VL's vision tower: transformers' class, and its output. Source: Qwen2.5-VL, arXiv 2502.13923."""

from __future__ import annotations

from torch import Tensor
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
    Qwen2_5_VLVisionRotaryEmbedding,
)

from framesieve.common.checkpoint import Checkpoint
from framesieve.services.encoder.tower.packing import PackedLayout, TowerShape
from framesieve.services.encoder.tower.tower import Tower
from framesieve.services.encoder.tower.vision_model import RunOptions, make_tower, vision_config


def load(checkpoint: Checkpoint, options: RunOptions) -> Tower:
    """What it raises: see `make_tower`."""
    config = vision_config(checkpoint, Qwen2_5_VLVisionConfig)
    merge = config.spatial_merge_size
    return make_tower(
        checkpoint,
        config,
        Qwen2_5_VisionTransformerPretrainedModel,
        Qwen2_5_VLVisionRotaryEmbedding,
        shape=TowerShape(merge, window_side=config.window_size // merge // config.patch_size),
        keywords=_keywords,
        hidden=config.hidden_size,
        embed_dim=config.out_hidden_size,
        options=options,
        windowed_layers=config.depth - len(config.fullatt_block_indexes),
    )


def _keywords(layout: PackedLayout[Tensor]) -> dict[str, Tensor | int | None]:
    return {
        "window_index": layout.order,
        "cu_window_seqlens": layout.window_ends,
        "max_window_seqlen": layout.longest_window,
    }
