"""LLaVA-OneVision's tower: SigLIP and a projector; frames of videos are pooled, tiles of an image put together.

    video       27 × 27 tokens of each frame ─▶ 14 × 14, bilinear
    image       27 × 27 tokens of the whole, and 27 × 27 of each tile ─▶ one picture, without its padding, shrunk

Newlines, which follow each row and each video, are text: generation stores their vector.
Source: `apply_pooling` and `pack_image_features` of transformers 5.24; arXiv 2408.03326.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

from transformers import LlavaOnevisionConfig

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.plan import MediaPlan, Modality
from gridsieve.families.llava.anyres import AnyRes
from gridsieve.families.llava.tiled_tower import check_frames, interpolated, tiled
from gridsieve.families.parts.projected import load_projected
from gridsieve.families.parts.tiles import check_plan
from gridsieve.services.encoder.tower.tower import Arrangement, Tower
from gridsieve.services.encoder.tower.vision_model import RunOptions


def load(checkpoint: Checkpoint, options: RunOptions) -> Tower:
    config = checkpoint.config_as(LlavaOnevisionConfig)
    tower = load_projected(checkpoint, config, options)
    anyres = AnyRes.of_onevision(config.to_dict())
    return replace(tower, arrange=_Arranging(anyres))


@dataclass(frozen=True, slots=True)
class _Arranging:
    """`Tower.arrange` of a checkpoint."""

    anyres: AnyRes

    def __call__(self, plan: MediaPlan) -> Arrangement:
        side, grid = self.anyres.tile_tokens, plan.grid
        check_frames(plan, self.anyres)
        if plan.modality is Modality.VIDEO:
            pooled = math.ceil(side / 2)
            check_plan(plan, (plan.frames.count, pooled, pooled), plan.frames.count)
            return Arrangement(pooled**2, of_slice=partial(interpolated, side=(side, side), to=(pooled, pooled)))
        if plan.frames.count == 1 and (grid.h, grid.w) == (side, side):
            return Arrangement(side**2)
        return tiled(self.anyres, plan)
