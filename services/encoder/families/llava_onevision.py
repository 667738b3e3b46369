"""LLaVA-OneVision's tower: SigLIP and a projector; frames of videos are pooled, tiles of an image put together.

    video       27 × 27 tokens of each frame ─▶ 14 × 14, bilinear
    image       27 × 27 tokens of the whole, and 27 × 27 of each tile ─▶ one picture, without its padding, shrunk

Newlines, which stand behind the rows and behind a video, are text: generation stores their vector.
Source: `apply_pooling` and `pack_image_features` of transformers 5.23; arXiv 2408.03326.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlavaOnevisionConfig

from common.anyres import AnyRes, Tiles
from common.checkpoint import Checkpoint
from common.contract.plan import MediaPlan, Modality
from services.encoder.families.llava import load_projected
from services.encoder.tower.attention import Wanted
from services.encoder.tower.tower import Arrangement, Tower


def load(checkpoint: Checkpoint, dtype: str, device: torch.device, attention: Wanted) -> Tower:
    """Raises StartupError if the checkpoint's tower is not supported or incomplete, or the attention is unavailable."""
    config = LlavaOnevisionConfig.from_pretrained(checkpoint.folder)
    tower = load_projected(checkpoint, config, dtype, device, attention)
    anyres = AnyRes.of(config.to_dict(), int(config.vision_aspect_ratio.removeprefix("anyres_max_")))
    return replace(tower, arrange=_Arranging(anyres))


@dataclass(frozen=True, slots=True)
class _Arranging:
    """`Tower.arrange` of a checkpoint."""

    anyres: AnyRes

    def __call__(self, plan: MediaPlan) -> Arrangement:
        side, grid = self.anyres.tile_tokens, plan.grid
        if (plan.frame_height_px, plan.frame_width_px) != (self.anyres.tile_px,) * 2:
            raise ValueError(f"they have {plan.frame_height_px}×{plan.frame_width_px} pixels")
        if plan.modality is Modality.VIDEO:
            pooled = math.ceil(side / 2)
            _check(plan, (plan.frames, pooled, pooled), plan.frames)
            return Arrangement(pooled**2, of_slice=partial(_shrunk, side=(side, side), to=(pooled, pooled)))
        if plan.frames == 1 and (grid.h, grid.w) == (side, side):
            return Arrangement(side**2)
        tiles = self.anyres.tiles(plan.source_height_px, plan.source_width_px)
        _check(plan, (1, 1, side**2 + math.prod(tiles.shrunk)), 1 + tiles.rows * tiles.columns)
        return Arrangement(side**2, of_item=partial(_one_picture, tiles=tiles, side=side))


def _check(plan: MediaPlan, grid: tuple[int, int, int], frames: int) -> None:
    if (plan.grid.t, plan.grid.h, plan.grid.w) != grid or plan.frames != frames:
        raise ValueError(f"{plan.frames} frames and {plan.grid} are not {frames} and {grid}")


def _shrunk(rows: Tensor, side: tuple[int, int], to: tuple[int, int]) -> Tensor:
    """Tokens (L, rows · columns, D) of a grid of this side, bilinearly interpolated to another."""
    grid = rows.unflatten(1, side).permute(0, 3, 1, 2)
    return F.interpolate(grid, size=to, mode="bilinear").flatten(2).transpose(1, 2)


def _one_picture(stored: Tensor, tiles: Tiles, side: int) -> Tensor:
    """The tokens of an image, (L, n, D), of those of its frames, (L, frames · side², D): the whole, then its tiles."""
    whole, others = stored[:, : side**2], stored[:, side**2 :]
    cut = others.unflatten(1, (tiles.rows, tiles.columns, side, side))
    grid = cut.transpose(2, 3).flatten(3, 4).flatten(1, 2)  # (L, rows, columns, D)
    top, left = (grid.shape[1] - tiles.unpadded[0]) // 2, (grid.shape[2] - tiles.unpadded[1]) // 2
    shown = grid[:, top : grid.shape[1] - top, left : grid.shape[2] - left].flatten(1, 2)
    if tiles.shrunk != tiles.unpadded:
        shown = _shrunk(shown, tiles.unpadded, tiles.shrunk)
    return torch.cat([whole, shown], dim=1)
