"""VideoLLaMA 3's tower: SigLIP with rotary positions over pictures of any size, and a projector.

    image       a token for each patch: features ─▶ projector
    video       a token for each four: features of each frame ─▶ their means ─▶ projector

So the tower gives features, and the projector runs for each slice.
Source: `VideoLlama3Model` of transformers 5.24, whose `pixel_unshuffle` halves the sides by bilinear interpolation,
which are means of four; arXiv 2501.13106.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from transformers import VideoLlama3Config
from transformers.models.video_llama_3.modeling_video_llama_3 import (
    VideoLlama3Projector,
    VideoLlama3VisionModel,
    VideoLlama3VisionRotaryEmbedding,
)

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.plan import MediaPlan, Modality
from gridsieve.families.parts.tiles import check_plan
from gridsieve.services.encoder.tower.attention import Attend
from gridsieve.services.encoder.tower.packing import PackedLayout, TowerShape
from gridsieve.services.encoder.tower.patches import Normalisation, PatchShape
from gridsieve.services.encoder.tower.tower import Arrangement, Tower
from gridsieve.services.encoder.tower.vision_model import LoadedModel, RunOptions, TowerModel, assemble

# Patches per side of a token of a video.
_MERGE = 2


def load(checkpoint: Checkpoint, options: RunOptions) -> Tower:
    config: Any = checkpoint.config_as(VideoLlama3Config)
    model, patch_px = _VideoLlama3.on_meta(config), int(config.vision_config.patch_size)
    return assemble(
        checkpoint,
        model,
        options,
        patches=PatchShape(patch_px, TowerShape(1)),
        embed_dim=config.text_config.hidden_size,
        features=config.vision_config.hidden_size,
        arrange=partial(_arranged, project=model.projector, patch_px=patch_px),
    )


class _VideoLlama3(TowerModel):
    """vision_model, projector: transformers'."""

    parts = ("vision_model.", "projector.")
    layers_at = "vision_model.encoder.layers"
    patch_embedding = "vision_model.embeddings.patch_embedding."

    def __init__(self, config: Any) -> None:
        super().__init__(config.vision_config)
        self.vision_model: Any = VideoLlama3VisionModel(config.vision_config)
        self.projector = VideoLlama3Projector(config)

    def embed_with(self, loaded: LoadedModel, normalisation: Normalisation) -> None:
        super().embed_with(loaded, normalisation)
        # Made again off the meta device: its frequencies are computed, not stored.
        self.vision_model.rotary_pos_emb = VideoLlama3VisionRotaryEmbedding(self.vision)
        del self.vision_model.embeddings

    def forward(self, patches: Tensor, layout: PackedLayout[Tensor], attend: Attend) -> Tensor:
        """Features (P, hidden) of patches uint8 (P, values)."""
        rows = self.patch_embed(patches)
        turned = self.vision_model.rotary_pos_emb(rows, layout.positions)
        for layer in self.layers:
            rows = layer(
                rows, cu_seqlens=layout.ends, max_seqlen=layout.longest, position_embeddings=turned, attend=attend
            )
        features: Tensor = self.vision_model.post_layernorm(rows)
        return features


def _arranged(plan: MediaPlan, project: Callable[[Tensor], Tensor], patch_px: int) -> Arrangement:
    """`Tower.arrange` of a checkpoint."""
    sides = plan.frames.size_px
    merge = _MERGE if plan.modality is Modality.VIDEO else 1
    if any(side % (merge * patch_px) for side in sides):
        raise ValueError(f"sides of {sides} are no multiples of {merge * patch_px}")
    rows, columns = (side // patch_px for side in sides)
    tokens = (rows // merge, columns // merge)
    check_plan(plan, (plan.frames.count, *tokens), plan.frames.count)
    if merge == 1:
        return Arrangement(rows * columns, of_slice=project)
    return Arrangement(tokens[0] * tokens[1], of_slice=partial(_means, side=(rows, columns), project=project))


def _means(features: Tensor, side: tuple[int, int], project: Callable[[Tensor], Tensor]) -> Tensor:
    """Features (1, rows · columns, hidden) of a frame of this side to its tokens (1, n, D)."""
    grid = features.unflatten(1, side).permute(0, 3, 1, 2)
    return project(F.avg_pool2d(grid, _MERGE).flatten(2).transpose(1, 2))
