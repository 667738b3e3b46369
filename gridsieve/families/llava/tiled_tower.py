"""Tiles of an image, put together to one picture: the whole and then its tiles.

Source: `pack_image_features` of transformers 5.24.
"""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from gridsieve.common.contract.plan import MediaPlan
from gridsieve.families.llava.anyres import AnyRes, Tiles
from gridsieve.families.parts.tiles import check_plan
from gridsieve.services.encoder.tower.tower import Arrangement


def tiled(anyres: AnyRes, plan: MediaPlan) -> Arrangement:
    """The arrangement of an image that is sent as tiles. Raises ValueError for a plan that these tiles do not make."""
    if not all(plan.file.source_px):
        raise ValueError("the size of the picture is not known")
    side = anyres.tile_tokens
    tiles = anyres.tiles(*plan.file.source_px)
    check_plan(plan, (1, 1, side**2 + math.prod(tiles.shrunk)), 1 + tiles.rows * tiles.columns)
    return Arrangement(side**2, of_item=partial(_one_picture, tiles=tiles, side=side))


def check_frames(plan: MediaPlan, anyres: AnyRes) -> None:
    """Raises ValueError for frames of another size than tiles have."""
    height, width = plan.frames.size_px
    if height != anyres.tile_px or width != anyres.tile_px:
        raise ValueError(f"they have {height}×{width} pixels")


def interpolated(rows: Tensor, side: tuple[int, int], to: tuple[int, int]) -> Tensor:
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
        shown = interpolated(shown, tiles.unpadded, tiles.shrunk)
    return torch.cat([whole, shown], dim=1)
