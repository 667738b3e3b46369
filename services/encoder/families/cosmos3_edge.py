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

from framesieve.common.checkpoint import Checkpoint
from framesieve.common.contract.retention import METHODS
from framesieve.common.cosmos3_edge import own_name
from framesieve.services.compute.packed_linear import pack_linears
from framesieve.services.encoder.tower.attention import Attend, Wanted, attend_by_length, packed_attention
from framesieve.services.encoder.tower.packing import Fit, PackedLayout, TowerShape
from framesieve.services.encoder.tower.patches import CHANNELS, FoldedPatchEmbed, PatchShape, read_normalisation
from framesieve.services.encoder.tower.tower import ModelForward, Tower, TowerSizes, linear_weights
from framesieve.services.encoder.tower.weights import choose_dtype, fill, find_weights, read_weights

_PARTS = ("visual.", "projector.")
_PATCH_EMBED = "visual.embeddings.patch_embedding."


def load(checkpoint: Checkpoint, dtype: str, device: torch.device, attention: Wanted) -> Tower:
    """Raises StartupError if the checkpoint's tower is incomplete, or the attention is unavailable."""
    config: Any = checkpoint.config_as(Cosmos3EdgeConfig)
    vision = config.vision_config
    vision._attn_implementation = "sdpa"
    with torch.device("meta"):
        model = _Cosmos3Edge(config)
    stored = {
        own_name(part + name): each
        for part in _PARTS
        for name, each in find_weights(checkpoint, (f"model.{part}",)).items()
    }
    runs_in = choose_dtype(stored, dtype, device, "SigLIP towers overflow it")
    weights = read_weights(stored, runs_in, device, _PATCH_EMBED)
    fill(model, weights, runs_in)
    patch_px = int(vision.patch_size)
    attend = packed_attention(vision, attention, device, runs_in)
    weight, bias = (weights[f"{_PATCH_EMBED}{name}"] for name in ("weight", "bias"))
    # A patch's values, in the order y, x, channel, to those of a convolution.
    convolution = weight.unflatten(1, (patch_px, patch_px, CHANNELS)).permute(0, 3, 1, 2)[:, :, None]
    model.embed_with(FoldedPatchEmbed(convolution, bias, read_normalisation(checkpoint), runs_in))
    sizes, layers = _sizes(model), tuple(model.visual.encoder.layers)
    pack_linears(model.eval().requires_grad_(False).to(device))

    def compute(patches: Tensor, layout: PackedLayout[Tensor]) -> Tensor:
        tokens: Tensor = model(patches, layout, attend)
        return tokens[None]

    merge = int(vision.spatial_merge_size)
    shape = TowerShape(merge, table_side=math.isqrt(vision.num_patches), fit=Fit.SMOOTHED)
    return Tower(
        forward=ModelForward(compute, shape, device, attend is not attend_by_length, layers),
        patches=PatchShape(patch_px, merge, 1),
        embed_dim=config.text_config.hidden_size,
        embed_levels=0,
        dtype=runs_in,
        device=device,
        sizes=sizes,
        pruning_methods=METHODS,
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


def _sizes(model: _Cosmos3Edge) -> TowerSizes:
    """Of each patch the table is multiplied, too."""
    in_layers, projector = linear_weights(model.visual.encoder), linear_weights(model.projector)
    weight = model.patch_embed.weight
    return TowerSizes(
        hidden=len(weight),
        patch_weights=in_layers + weight.numel() + model.table.numel(),
        token_weights=projector,
        full_layers=len(model.visual.encoder.layers),
    )
