"""Cosmos 3 Edge's tower: SigLIP 2 over pictures of any size, and a projector that makes a token of four patches.

    patches ─▶ embedding + positions ─▶ layers ─▶ norm ─▶ 2 × 2 to a token

Its table of positions is resized to each frame, as an image is: linear, with antialiasing.
Source: `Cosmos3EdgeModel` of transformers 5.24; weight names of nvidia/Cosmos3-Edge.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor, nn
from transformers import Cosmos3EdgeConfig
from transformers.models.cosmos3_edge.modeling_cosmos3_edge import Cosmos3EdgePatchMerger, Cosmos3EdgeVisionModel

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.families.cosmos.names import own_name
from gridsieve.services.encoder.tower.attention import Attend
from gridsieve.services.encoder.tower.packing import Array, PackedLayout, TowerShape
from gridsieve.services.encoder.tower.patches import CHANNELS, FoldedPatchEmbed, Normalisation, PatchShape
from gridsieve.services.encoder.tower.tower import Tower, TowerSizes
from gridsieve.services.encoder.tower.vision_model import LoadedModel, RunOptions, TowerModel, assemble
from gridsieve.services.encoder.tower.weights import Stored


def load(checkpoint: Checkpoint, options: RunOptions) -> Tower:
    config: Any = checkpoint.config_as(Cosmos3EdgeConfig)
    vision = config.vision_config
    merge, table = int(vision.spatial_merge_size), SmoothedTable(math.isqrt(vision.num_patches))
    return assemble(
        checkpoint,
        _Cosmos3Edge.on_meta(config),
        options,
        patches=PatchShape(int(vision.patch_size), TowerShape(merge, table=table)),
        embed_dim=config.text_config.hidden_size,
    )


@dataclass(frozen=True, slots=True)
class SmoothedTable:
    """A square table of `side` entries a side, resized to each frame: a patch takes a weighted sum of all entries."""

    side: int

    def by_row(self, positions: Array, rows: int, columns: int) -> Mapping[str, Array]:
        """See `Table`. table_weights: float32 (P, 2, side): the weight of an entry is that of its row times that of its
        column."""
        axes = [_smoothed_axis(length, self.side)[positions[:, axis]] for axis, length in enumerate((rows, columns))]
        return {"table_weights": np.stack(axes, axis=1)}


def _smoothed_axis(length: int, table_side: int) -> Array:
    """The weights of all entries of a table's axis for each place of an axis: float32 (length, table_side).

    A triangle around the middle of a place, as wide as the place where that is wider than an entry: bilinear
    interpolation of `torch.nn.functional.interpolate` with antialiasing.
    """
    place = table_side / length  # in entries
    middles = (np.arange(length) + 0.5) * place
    apart = np.abs(np.arange(table_side) + 0.5 - middles[:, None]) / max(place, 1)
    weights: Array = np.maximum(1 - apart, 0)
    weights /= weights.sum(1, keepdims=True)
    return weights.astype(np.float32)


class _Cosmos3Edge(TowerModel):
    """visual, projector: transformers'. table: of positions, float32 (side², hidden)."""

    parts = ("visual.", "projector.")
    layers_at = "visual.encoder.layers"
    patch_embedding = "visual.embeddings.patch_embedding."

    def __init__(self, config: Any) -> None:
        super().__init__(config.vision_config)
        self.visual: Any = Cosmos3EdgeVisionModel(config.vision_config)
        self.projector = Cosmos3EdgePatchMerger(config)

    def find(self, checkpoint: Checkpoint) -> Mapping[str, Stored]:
        return {own_name(name): each for name, each in super().find(checkpoint).items()}

    def embed_with(self, loaded: LoadedModel, normalisation: Normalisation) -> None:
        weight, bias = (loaded.weights[f"{self.patch_embedding}{name}"] for name in ("weight", "bias"))
        side = int(self.vision.patch_size)
        # A patch's values, in the order y, x, channel, to those of a convolution.
        convolution = weight.unflatten(1, (side, side, CHANNELS)).permute(0, 3, 1, 2)[:, :, None]
        self.patch_embed = FoldedPatchEmbed(convolution, bias, normalisation, loaded.dtype)
        self.table = nn.Parameter(self.visual.embeddings.position_embedding.weight.float())
        del self.visual.embeddings

    def sizes(self) -> TowerSizes:
        sizes = super().sizes()
        return replace(sizes, patch_weights=sizes.patch_weights + self.table.numel())  # each patch multiplies the table

    def forward(self, patches: Tensor, layout: PackedLayout[Tensor], attend: Attend) -> Tensor:
        """Tokens (T, D) of patches uint8 (P, values)."""
        row, column = layout.by_row["table_weights"].unbind(1)
        places = (row[:, :, None] * column[:, None]).flatten(1) @ self.table
        rows = self.patch_embed(patches)
        rows = rows + places.to(rows.dtype)
        for layer in self.layers:
            rows = layer(rows, cu_seqlens=layout.ends, max_seqlen=layout.longest, attend=attend)
        tokens: Tensor = self.projector(self.visual.post_layernorm(rows))
        return tokens
