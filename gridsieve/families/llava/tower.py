"""LLaVA 1.5's tower: CLIP, SigLIP or Pixtral, and a projector. Mistral 3's: Pixtral and one that merges patches.

Source: `LlavaModel` and `Mistral3Model` of transformers 5.24.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import LlavaConfig, Mistral3Config
from transformers.models.mistral3.modeling_mistral3 import Mistral3MultiModalProjector

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.families.parts.projected import load_projected
from gridsieve.services.encoder.tower.tower import Tower
from gridsieve.services.encoder.tower.vision_model import RunOptions


def load(checkpoint: Checkpoint, options: RunOptions) -> Tower:
    return load_projected(checkpoint, checkpoint.config_as(LlavaConfig), options)


class _MergingProjector(Mistral3MultiModalProjector):
    """Takes the patches of a token one after the other, where transformers' takes those of a picture row by row."""

    def forward(self, features: Tensor) -> Tensor:
        merger = self.patch_merger
        normed = self.norm(features).unflatten(0, (-1, merger.spatial_merge_size**2))
        merged: Tensor = merger.merging_layer(normed.transpose(1, 2).flatten(1))
        projected: Tensor = self.linear_2(self.act(self.linear_1(merged)))
        return projected


def load_mistral3(checkpoint: Checkpoint, options: RunOptions) -> Tower:
    config: Any = checkpoint.config_as(Mistral3Config)
    layers = config.vision_feature_layer
    if not isinstance(layers, int) and len(layers) > 1:
        raise StartupError(
            f"vision_feature_layer {layers} is not supported, only one layer: the projector takes no more"
        )
    merge = config.spatial_merge_size
    return load_projected(checkpoint, config, options, projector=_MergingProjector, merge=merge)
