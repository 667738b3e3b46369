"""Ovis2's tower: AIMv2 over pictures of one size, and tokens that are weighted sums of the rows of a table.

    2 × 2 patches ─▶ linear ─▶ norm ─▶ softmax: weights (T, rows) ─▶ times the table: tokens (T, D)

The last rows of the table have no weights: they are the vectors that generation stores.
Source: `Ovis2Model.get_image_features` of transformers 5.24, whose layers these are; arXiv 2405.20797.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor
from transformers import Ovis2Config
from transformers.models.clip.modeling_clip import CLIPAttention
from transformers.models.ovis2.modeling_ovis2 import (
    Ovis2VisionAttention,
    Ovis2VisionModel,
    Ovis2VisualEmbeddingTable,
)

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.families.parts.tiles import one_after_the_other
from gridsieve.services.encoder.tower.attention import Attend
from gridsieve.services.encoder.tower.packing import PackedLayout, Side, TowerShape
from gridsieve.services.encoder.tower.patches import Normalisation, PatchShape
from gridsieve.services.encoder.tower.tower import Tower, TowerSizes
from gridsieve.services.encoder.tower.vision_model import LoadedModel, RunOptions, TowerModel, assemble


def load(checkpoint: Checkpoint, options: RunOptions) -> Tower:
    """Raises StartupError if the checkpoint's tower is not supported or incomplete, or the attention is unavailable."""
    config: Any = checkpoint.config_as(Ovis2Config)
    vision = config.vision_config
    side, merge = vision.image_size // vision.patch_size, vision.hidden_stride
    if side % merge:
        raise StartupError(f"hidden_stride {merge} does not divide the {side} patches of a side")
    if vision.tokenize_function != "softmax":
        raise StartupError(f"tokenize_function {vision.tokenize_function!r} is not supported, only 'softmax'")
    patches = PatchShape(vision.patch_size, TowerShape(merge, fixed=Side(side, side)))
    return assemble(
        checkpoint,
        _Ovis2.on_meta(config),
        options,
        patches=patches,
        embed_dim=config.text_config.hidden_size,
        arrange=partial(one_after_the_other, patches),
    )


class _Attention(Ovis2VisionAttention):
    """CLIP's has the same parts and, other than Ovis2's, passes the ends of sequences on to the attention."""

    forward = CLIPAttention.forward


class _Ovis2(TowerModel):
    """vision_tower, visual_embeddings_table: transformers'."""

    parts = ("vision_tower.", "visual_embeddings_table.")
    layers_at = "vision_tower.transformer.encoder.layers"
    patch_embedding = "vision_tower.transformer.embeddings.patch_embedding."
    passing_on = (_Attention,)

    def __init__(self, config: Any) -> None:
        super().__init__(config.vision_config)
        vision = config.vision_config
        self.vision_tower: Any = Ovis2VisionModel(vision)
        self.visual_embeddings_table = Ovis2VisualEmbeddingTable(vision.vocab_size, config.text_config.hidden_size)
        self._weighted = vision.vocab_size - vision.num_visual_indicator_tokens
        self._side = vision.image_size // vision.patch_size

    def embed_with(self, loaded: LoadedModel, normalisation: Normalisation) -> None:
        super().embed_with(loaded, normalisation)
        embeddings = self.vision_tower.transformer.embeddings
        self.embed_norm, self.places = embeddings.rms_norm, embeddings.position_embedding
        del self.vision_tower.transformer.embeddings

    def sizes(self) -> TowerSizes:
        sizes = super().sizes()
        return replace(sizes, token_weights=sizes.token_weights + self.visual_embeddings_table.weight.numel())

    def forward(self, patches: Tensor, layout: PackedLayout[Tensor], attend: Attend) -> Tensor:
        """Tokens (T, D) of patches uint8 (P, values)."""
        row, column = layout.positions.unbind(1)
        rows = self.embed_norm(self.patch_embed(patches)) + self.places(row * self._side + column)
        states = self.vision_tower.transformer.rms_norm(self.run_layers(rows[None], layout, attend))[0]
        merged = states.unflatten(0, (-1, self.vision.hidden_stride**2)).flatten(1)
        weights = self.vision_tower.head_norm(self.vision_tower.head_linear(merged)).softmax(dim=-1)
        tokens: Tensor = weights @ self.visual_embeddings_table.weight[: self._weighted]
        return tokens
