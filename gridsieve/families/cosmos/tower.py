"""Cosmos 3 Edge's tower: SigLIP 2 over pictures of any size, and a projector that makes a token of four patches.

    patches ─▶ embedding + positions ─▶ layers ─▶ norm ─▶ 2 × 2 to a token

Its table of positions is resized to each frame, as an image is: linear, with antialiasing.
Source: `Cosmos3EdgeModel` of transformers 5.24; weight names of nvidia/Cosmos3-Edge.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cosmos3EdgeConfig
from transformers.models.cosmos3_edge.modeling_cosmos3_edge import Cosmos3EdgePatchMerger, Cosmos3EdgeVisionModel

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.families.cosmos.names import own_name
from gridsieve.services.encoder.tower.attention import Attend
from gridsieve.services.encoder.tower.packing import Fit, PackedLayout, TowerShape
from gridsieve.services.encoder.tower.patches import CHANNELS, FoldedPatchEmbed, PatchShape, read_normalisation
from gridsieve.services.encoder.tower.tower import Tower, sizes_of
from gridsieve.services.encoder.tower.vision_model import RunOptions, load_model
from gridsieve.services.encoder.tower.weights import find_parts

_PARTS = ("visual.", "projector.")
_PATCH_EMBED = "visual.embeddings.patch_embedding."


def load(checkpoint: Checkpoint, options: RunOptions) -> Tower:
    """Raises StartupError if the checkpoint's tower is incomplete, or the attention is unavailable."""
    config: Any = checkpoint.config_as(Cosmos3EdgeConfig)
    vision = config.vision_config
    vision._attn_implementation = "sdpa"
    with torch.device("meta"):
        model = _Cosmos3Edge(config)
    stored = {own_name(name): each for name, each in find_parts(checkpoint, _PARTS).items()}
    loaded = load_model(model, vision, stored, _PATCH_EMBED, options)
    patch_px, merge = int(vision.patch_size), int(vision.spatial_merge_size)
    weight, bias = (loaded.weights[f"{_PATCH_EMBED}{name}"] for name in ("weight", "bias"))
    # A patch's values, in the order y, x, channel, to those of a convolution.
    convolution = weight.unflatten(1, (patch_px, patch_px, CHANNELS)).permute(0, 3, 1, 2)[:, :, None]
    model.embed_with(FoldedPatchEmbed(convolution, bias, read_normalisation(checkpoint), loaded.dtype))
    layers = model.visual.encoder.layers
    # Of each patch the table is multiplied, too.
    patch_weights = model.patch_embed.weight.numel() + model.table.numel()
    return loaded.tower(
        layers,
        shape=TowerShape(merge, table_side=math.isqrt(vision.num_patches), fit=Fit.SMOOTHED),
        patches=PatchShape(patch_px, merge, 1),
        sizes=sizes_of(vision.hidden_size, layers, patch_weights, model.projector),
        embed_dim=config.text_config.hidden_size,
    )


class _Cosmos3Edge(nn.Module):
    """visual, projector: transformers'. table: of positions, float32 (side², hidden)."""

    patch_embed: FoldedPatchEmbed

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.visual: Any = Cosmos3EdgeVisionModel(config.vision_config)
        self.projector = Cosmos3EdgePatchMerger(config)

    def embed_with(self, patch_embed: FoldedPatchEmbed) -> None:
        """Replaces the embedding by one of uint8 patches, once the model has its weights."""
        self.patch_embed = patch_embed
        self.table = nn.Parameter(self.visual.embeddings.position_embedding.weight.float())
        del self.visual.embeddings

    def forward(self, patches: Tensor, layout: PackedLayout[Tensor], attend: Attend) -> Tensor:
        """Tokens (T, D) of patches uint8 (P, values)."""
        assert layout.table_weights is not None
        row, column = layout.table_weights.unbind(1)
        places = (row[:, :, None] * column[:, None]).flatten(1) @ self.table
        rows = self.patch_embed(patches)
        rows = rows + places.to(rows.dtype)
        for layer in self.visual.encoder.layers:
            rows = layer(rows, cu_seqlens=layout.ends, max_seqlen=layout.longest, attend=attend)
        tokens: Tensor = self.projector(self.visual.post_layernorm(rows))
        return tokens
