"""LLaVA-NeXT-Video's tower: CLIP and a projector; frames of videos are pooled before they are projected.

    video       24 × 24 features of each frame ─▶ 12 × 12 ─▶ projector
    image       24 × 24 of the whole and of each tile ─▶ projector ─▶ one picture, without its padding

So the tower gives features, and the projector runs for each frame. Newlines are text: generation stores their vector.
Source: `LlavaNextVideoPooler` and `pack_image_features` of transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from transformers import LlavaNextVideoConfig

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.common.contract.plan import MediaPlan, Modality
from gridsieve.families.llava.anyres import AnyRes
from gridsieve.families.llava.tiled_tower import check_frames, tiled
from gridsieve.families.parts.projected import load_projected
from gridsieve.families.parts.tiles import check_plan
from gridsieve.services.encoder.tower.tower import Arrangement, Tower
from gridsieve.services.encoder.tower.vision_model import RunOptions

_POOLS: dict[str, Callable[..., Tensor]] = {"average": F.avg_pool2d, "max": F.max_pool2d}


def load(checkpoint: Checkpoint, options: RunOptions) -> Tower:
    config: Any = checkpoint.config_as(LlavaNextVideoConfig)
    if config.spatial_pool_mode not in _POOLS:
        raise StartupError(f"spatial_pool_mode {config.spatial_pool_mode!r} is not supported, only {', '.join(_POOLS)}")
    pool = partial(_POOLS[config.spatial_pool_mode], kernel_size=config.spatial_pool_stride)
    arranging = partial(_Arranging, AnyRes.of(config.to_dict(), None), pool, config.spatial_pool_stride)
    return load_projected(checkpoint, config, options, arrange=arranging)


@dataclass(frozen=True, slots=True)
class _Arranging:
    """`Tower.arrange` of a checkpoint."""

    anyres: AnyRes
    pool: Callable[[Tensor], Tensor]
    stride: int
    projector: Callable[[Tensor], Tensor]

    def __call__(self, plan: MediaPlan) -> Arrangement:
        check_frames(plan, self.anyres)
        if plan.modality is Modality.IMAGE:
            return replace(tiled(self.anyres, plan), of_slice=self.projector)
        pooled = self.anyres.tile_tokens // self.stride
        check_plan(plan, (plan.frames.count, pooled, pooled), plan.frames.count)
        return Arrangement(pooled**2, of_slice=self._pooled)

    def _pooled(self, rows: Tensor) -> Tensor:
        side = self.anyres.tile_tokens
        grid = rows.unflatten(1, (side, side)).permute(0, 3, 1, 2)
        return self.projector(self.pool(grid).flatten(2).transpose(1, 2))
