"""SmolVLM2's tower: SigLIP over squares of one size, a pixel shuffle of its patches to tokens, and a linear layer.

Source: `SmolVLMModel.get_image_features` of transformers 5.24, whose layers these are; arXiv 2504.05299.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import SmolVLMConfig
from transformers.models.clip.modeling_clip import CLIPAttention
from transformers.models.smolvlm.modeling_smolvlm import (
    SmolVLMConnector,
    SmolVLMVisionAttention,
    SmolVLMVisionTransformer,
)

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.common.contract.plan import MediaPlan
from gridsieve.families.parts.tiles import one_after_the_other
from gridsieve.services.encoder.tower.attention import Attend
from gridsieve.services.encoder.tower.packing import PackedLayout, Side, TowerShape
from gridsieve.services.encoder.tower.patches import Normalisation, PatchShape
from gridsieve.services.encoder.tower.tower import Arrangement, Tower
from gridsieve.services.encoder.tower.vision_model import LoadedModel, RunOptions, TowerModel, assemble


def load(checkpoint: Checkpoint, options: RunOptions) -> Tower:
    """Raises StartupError if the checkpoint's tower is not supported or incomplete, or the attention is unavailable."""
    config: Any = checkpoint.config_as(SmolVLMConfig)
    vision, merge = config.vision_config, config.scale_factor
    side = vision.image_size // vision.patch_size
    if side % merge:
        raise StartupError(f"scale_factor {merge} does not divide the {side} patches of a side")
    patches = PatchShape(vision.patch_size, TowerShape(merge, fixed=Side(side, side)))
    return assemble(
        checkpoint,
        _SmolVLM.on_meta(config),
        options,
        patches=patches,
        embed_dim=config.text_config.hidden_size,
        arrange=partial(_arranged, patches),
    )


class _Attention(SmolVLMVisionAttention):
    """CLIP's has the same parts and, other than SmolVLM's, passes the ends of sequences on to the attention."""

    forward = CLIPAttention.forward


class _SmolVLM(TowerModel):
    """vision_model, connector: transformers'. places: position embeddings, row by row, (patches of a frame, hidden)."""

    places: Tensor
    parts = ("vision_model.", "connector.")
    layers_at = "vision_model.encoder.layers"
    patch_embedding = "vision_model.embeddings.patch_embedding."
    passing_on = (_Attention,)

    def __init__(self, config: Any) -> None:
        super().__init__(config.vision_config)
        self.vision_model: Any = SmolVLMVisionTransformer(config.vision_config)
        self.connector = SmolVLMConnector(config)
        self._side = config.vision_config.image_size // config.vision_config.patch_size

    def embed_with(self, loaded: LoadedModel, normalisation: Normalisation) -> None:
        super().embed_with(loaded, normalisation)
        cells = _cells(self._side)
        table = self.vision_model.embeddings.position_embedding.weight.unflatten(0, (self._side, self._side))
        self.places = nn.Parameter(table[cells][:, cells].flatten(0, 1).detach(), requires_grad=False)
        del self.vision_model.embeddings

    def forward(self, patches: Tensor, layout: PackedLayout[Tensor], attend: Attend) -> Tensor:
        """Tokens (T, D) of patches uint8 (P, values)."""
        row, column = layout.positions.unbind(1)
        rows = self.patch_embed(patches) + self.places[row * self._side + column]
        states = self.run_layers(rows[None], layout, attend)
        features = self.vision_model.post_layernorm(states)[0]
        # The patches of a token follow each other, in the order in which transformers' pixel shuffle puts them.
        tokens: Tensor = self.connector.modality_projection(
            features.unflatten(0, (-1, self.connector.scale_factor**2)).flatten(1)
        )
        return tokens


def _cells(side: int) -> Tensor:
    """The row of the table that each row of patches takes, int64 (side,), by transformers' operations.

    Their rounding decides at the borders: of 38 rows number 12 takes the place of the one before. Of the published
    sides, 27 and 32, each takes its own.
    """
    borders = torch.arange(1 / side, 1.0, 1 / side)
    begins = torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor(side))
    return torch.bucketize(begins.clamp(max=1.0 - 1e-6), borders, right=True)


def _arranged(patches: PatchShape, plan: MediaPlan) -> Arrangement:
    """`Tower.arrange` of a checkpoint. Of an image in tiles the whole is sent first, and stands last in the prompt."""
    arranged = one_after_the_other(patches, plan)
    if not plan.frames.tile_columns:
        return arranged
    return replace(arranged, of_item=_whole_last(arranged.slice_tokens))


def _whole_last(tokens: int) -> Callable[[Tensor], Tensor]:
    return partial(torch.roll, shifts=-tokens, dims=1)
