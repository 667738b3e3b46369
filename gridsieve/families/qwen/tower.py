"""Qwen's vision towers: transformers' classes, and their output.

    Qwen2-VL      the embedding                                       arXiv 2409.12191
    Qwen2.5-VL    the same; most layers attend within windows         arXiv 2502.13923
    Qwen2.5-Omni  Qwen2.5-VL's, with queries, keys and values apart   arXiv 2503.20215
    Qwen3-VL      the embedding, then deepstack features, a level     arXiv 2511.21631, arXiv 2406.04334
                  each, in the order of the text model's layers
    Qwen3.5       Qwen3-VL's without deepstack, also 3.6 and 3.8
    Qwen3-Omni    Qwen3-VL's with other names of weights              arXiv 2509.17765

`Qwen3_5VisionModel` of transformers 5.24 is `Qwen3VLVisionModel` without the mergers of deepstack, layer for layer.
Those of dense models and of mixtures of experts are alike.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniVisionEncoderConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    Qwen2_5OmniVisionEncoder,
    Qwen2_5OmniVisionRotaryEmbedding,
)
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
    Qwen2_5_VLVisionRotaryEmbedding,
)
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import (
    Qwen2VisionTransformerPretrainedModel,
    Qwen2VLVisionRotaryEmbedding,
)
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeVisionEncoderConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeVisionEncoder,
    Qwen3OmniMoeVisionRotaryEmbedding,
)
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel, Qwen3VLVisionRotaryEmbedding

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.families.parts.tables import InterpolatedTable
from gridsieve.services.encoder.tower.packing import Array, PackedLayout, TowerShape
from gridsieve.services.encoder.tower.tower import Tower
from gridsieve.services.encoder.tower.vision_model import RunOptions, make_tower, vision_config


def load_qwen2_vl(checkpoint: Checkpoint, options: RunOptions) -> Tower:
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


def load_qwen2_5_vl(checkpoint: Checkpoint, options: RunOptions) -> Tower:
    config = vision_config(checkpoint, Qwen2_5_VLVisionConfig)
    model_class, rotary_class = Qwen2_5_VisionTransformerPretrainedModel, Qwen2_5_VLVisionRotaryEmbedding
    return _windowed(checkpoint, config, model_class, rotary_class, options)


def load_qwen2_5_omni(checkpoint: Checkpoint, options: RunOptions) -> Tower:
    config = vision_config(checkpoint, Qwen2_5OmniVisionEncoderConfig)
    return _windowed(checkpoint, config, Qwen2_5OmniVisionEncoder, Qwen2_5OmniVisionRotaryEmbedding, options)


def _windowed(checkpoint: Checkpoint, config: Any, model_class: Any, rotary_class: Any, options: RunOptions) -> Tower:
    merge = config.spatial_merge_size
    return make_tower(
        checkpoint,
        config,
        model_class,
        rotary_class,
        shape=TowerShape(merge, window_side=config.window_size // merge // config.patch_size),
        keywords=_windows,
        hidden=config.hidden_size,
        embed_dim=config.out_hidden_size,
        options=options,
        windowed_layers=config.depth - len(config.fullatt_block_indexes),
    )


def load_qwen3_vl(checkpoint: Checkpoint, options: RunOptions) -> Tower:
    config = vision_config(checkpoint, Qwen3VLVisionConfig)
    return _load_qwen3(checkpoint, config, Qwen3VLVisionModel, Qwen3VLVisionRotaryEmbedding, options)


def load_qwen3_5(checkpoint: Checkpoint, options: RunOptions) -> Tower:
    config = vision_config(checkpoint, Qwen3VLVisionConfig)
    config.deepstack_visual_indexes = ()  # saved configs lack the field, whose default is Qwen3-VL's layers
    return _load_qwen3(checkpoint, config, Qwen3VLVisionModel, Qwen3VLVisionRotaryEmbedding, options)


def load_qwen3_omni(checkpoint: Checkpoint, options: RunOptions) -> Tower:
    config = vision_config(checkpoint, Qwen3OmniMoeVisionEncoderConfig)
    return _load_qwen3(checkpoint, config, Qwen3OmniMoeVisionEncoder, Qwen3OmniMoeVisionRotaryEmbedding, options)


def _load_qwen3(checkpoint: Checkpoint, config: Any, model_class: Any, rotary_class: Any, options: RunOptions) -> Tower:
    table_side = math.isqrt(config.num_position_embeddings)
    return make_tower(
        checkpoint,
        config,
        model_class,
        rotary_class,
        shape=TowerShape(config.spatial_merge_size, table=InterpolatedTable(table_side, corner_axis)),
        keywords=_entries,
        levels=_levels,
        embed_levels=len(config.deepstack_visual_indexes),
        hidden=config.hidden_size,
        embed_dim=config.out_hidden_size,
        options=options,
    )


def corner_axis(places: Array, length: int, table_side: int) -> tuple[Array, Array]:
    """The two table entries nearest to each place of an axis, and their weights: linear, with both ends aligned.

    Computed in float32, in the order of transformers' operations, so that both round alike.
    """
    at = places.astype(np.float32) * np.float32(table_side - 1) / np.float32(max(length - 1, 1))
    below = np.floor(at)
    offsets = np.arange(2)
    weights = 1 - np.abs(at[:, None] - below[:, None] - offsets.astype(np.float32))
    return np.clip(below.astype(np.int64)[:, None] + offsets, 0, table_side - 1), np.maximum(weights, 0)


def _windows(layout: PackedLayout[Tensor]) -> dict[str, Tensor | int | None]:
    return {
        "window_index": layout.order,
        "cu_window_seqlens": layout.window_ends,
        "max_window_seqlen": layout.longest_window,
    }


def _entries(layout: PackedLayout[Tensor]) -> dict[str, Tensor]:
    return {"interp_indices": layout.by_row["entries"], "interp_weights": layout.by_row["weights"]}


def _levels(output: Any) -> Tensor:
    return torch.stack([output.pooler_output, *output.deepstack_features])
