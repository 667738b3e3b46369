"""GLM-4.1V's, 4.5V's and 4.6V's vision tower: transformers' class, and its output.

Its stored positions are laid over a slice cell on cell, and a patch takes a bicubic mix of sixteen of them.
Source: `Glm4vVisionModel` of transformers 5.24; arXiv 2507.01006.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor
from transformers.models.glm4v.configuration_glm4v import Glm4vVisionConfig
from transformers.models.glm4v.modeling_glm4v import (
    Glm4vVisionEmbeddings,
    Glm4vVisionModel,
    Glm4vVisionRotaryEmbedding,
)

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.families.parts.tables import InterpolatedTable
from gridsieve.services.encoder.tower.packing import Array, PackedLayout, TowerShape
from gridsieve.services.encoder.tower.tower import Tower
from gridsieve.services.encoder.tower.vision_model import RunOptions, make_tower, vision_config


class _Embeddings(Glm4vVisionEmbeddings):
    """Takes the table's entries and their weights for each patch in place of the sides of slices."""

    def forward(self, rows: Tensor, _: Tensor, mixed: tuple[Tensor, Tensor], *__: Tensor) -> Tensor:
        entries, weights = mixed
        table = self.position_embedding.weight.float()
        return rows + F.embedding_bag(entries, table, per_sample_weights=weights, mode="sum").to(rows.dtype)


class _Tower(Glm4vVisionModel):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.embeddings = _Embeddings(config)


def load(checkpoint: Checkpoint, options: RunOptions) -> Tower:
    config = vision_config(checkpoint, Glm4vVisionConfig)
    table = InterpolatedTable(config.image_size // config.patch_size, _cubic_axis)
    return make_tower(
        checkpoint,
        config,
        _Tower,
        Glm4vVisionRotaryEmbedding,
        shape=TowerShape(config.spatial_merge_size, table=table),
        keywords=_keywords,
        hidden=config.hidden_size,
        embed_dim=config.out_hidden_size,
        options=options,
    )


def _keywords(layout: PackedLayout[Tensor]) -> dict[str, Any]:
    return {"grid_thw": (layout.by_row["entries"], layout.by_row["weights"])}  # for the embeddings alone


def _cubic_axis(places: Array, length: int, table_side: int) -> tuple[Array, Array]:
    """The four table entries nearest to each place of an axis, and their weights: cubic, cell on cell.

    Entries outside the table are those at its border. Computed in float32, as `torch.nn.functional.grid_sample` does:
    Keys' convolution with a = −3/4.
    """
    half = np.float32(0.5)
    scaled = (places.astype(np.float32) + half) / np.float32(length) * np.float32(2) - np.float32(1)
    at = ((scaled + np.float32(1)) * np.float32(table_side) - np.float32(1)) * half
    below = np.floor(at)
    offsets = np.arange(-1, 3)
    x = np.abs((at - below)[:, None] - offsets.astype(np.float32))
    a = np.float32(-0.75)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    weights = np.where(x <= 1, near, far).astype(np.float32)
    return np.clip(below.astype(np.int64)[:, None] + offsets, 0, table_side - 1), weights
