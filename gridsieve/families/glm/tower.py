"""GLM-4.1V's, 4.5V's and 4.6V's vision tower: transformers' class, and its output.

Its stored positions are laid over a slice cell on cell, and a patch takes a bicubic mix of sixteen of them.
Source: `Glm4vVisionModel` of transformers 5.24; arXiv 2507.01006.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from transformers.models.glm4v.configuration_glm4v import Glm4vVisionConfig
from transformers.models.glm4v.modeling_glm4v import (
    Glm4vVisionEmbeddings,
    Glm4vVisionModel,
    Glm4vVisionRotaryEmbedding,
)

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.services.encoder.tower.packing import Fit, PackedLayout, TowerShape
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
    """What it raises: see `make_tower`."""
    config = vision_config(checkpoint, Glm4vVisionConfig)
    table_side = config.image_size // config.patch_size
    return make_tower(
        checkpoint,
        config,
        _Tower,
        Glm4vVisionRotaryEmbedding,
        shape=TowerShape(config.spatial_merge_size, table_side=table_side, fit=Fit.CELLS),
        keywords=_keywords,
        hidden=config.hidden_size,
        embed_dim=config.out_hidden_size,
        options=options,
    )


def _keywords(layout: PackedLayout[Tensor]) -> dict[str, Any]:
    return {"grid_thw": (layout.interpolation_indices, layout.interpolation_weights)}  # for the embeddings alone
