"""The vision tower over some tokens of a slice, written a second time with transformers' own layers: its reference.

Nothing here imports the services. Every slice, and every window of a windowed layer, is computed by itself.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.families import FamilyUnderTest
from tests.families.cosmos3_edge import Vision


def patches_of(frames: NDArray[np.uint8], folder: Path, shape: FamilyUnderTest) -> Tensor:
    """Frames [F, H, W, 3] as patches of transformers' video processor, by slice, by token, then within it.

    float32 [slices · rows · columns, values], computed in float64. The last frame is repeated to a whole patch.
    """
    px, merge, deep = shape.patch_px, shape.merge, shape.temporal_patch
    frames = np.concatenate([frames, frames[-1:].repeat(-len(frames) % deep, 0)])
    config = json.loads((folder / "video_preprocessor_config.json").read_text())
    mean, std = np.array(config["image_mean"]), np.array(config["image_std"])
    values = (frames.astype(np.float64) * config.get("rescale_factor", 1 / 255) - mean) / std
    rows, columns = frames.shape[1] // px // merge, frames.shape[2] // px // merge
    parts = values.reshape(-1, deep, rows, merge, px, columns, merge, px, 3)
    # (slice, frame, row, inner row, y, column, inner column, x, channel) to the tower's order
    within = (4, 7, 8, 1) if shape.channels_last else (8, 1, 4, 7)
    patches = parts.transpose(0, 2, 5, 3, 6, *within).reshape(-1, 3 * deep * px**2)
    return torch.from_numpy(patches).float()


@torch.no_grad()
def kept_embeds(
    tower: Any, patches: Tensor, grid: tuple[int, int], kept: Sequence[int], shape: FamilyUnderTest
) -> Tensor:
    """All levels of the kept tokens of one slice, which see nothing but each other: [1 + levels, k, D].

    tower: transformers' vision tower. patches: of the whole slice, as `patches_of` orders them. grid: its rows and
    columns of tokens. kept: increasing tokens.
    """
    merge, (rows, columns) = shape.merge, grid
    inner = [(y, x) for y in range(merge) for x in range(merge)]
    owners = [token for token in kept for _ in inner]
    places = [(token // columns * merge + y, token % columns * merge + x) for token in kept for y, x in inner]
    own = patches.view(rows * columns, len(inner), -1)[list(kept)].flatten(0, 1)
    if isinstance(tower, Vision):
        return tower.kept_embeds(own, places, (rows * merge, columns * merge))[None]
    hidden = tower.patch_embed(own)
    if hasattr(tower, "post_conv_layernorm"):
        sides = torch.tensor([[1, rows * merge, columns * merge]])
        row, column = torch.tensor(places).T
        hidden = tower.embeddings(tower.post_conv_layernorm(hidden), [len(hidden)], sides, row, column)
    if hasattr(tower, "pos_embed"):
        hidden = hidden + torch.stack([_position(tower, place, (rows * merge, columns * merge)) for place in places])
    rotary = tower.rotary_pos_emb(hidden, torch.tensor(places))
    levels = []
    for number, block in enumerate(tower.blocks):
        side = 0
        if number not in getattr(tower, "fullatt_block_indexes", [number]):
            side = tower.window_size // shape.patch_px // merge
        seen: dict[Any, list[int]] = {}
        for row, token in enumerate(owners):
            seen.setdefault(side and (token // columns // side, token % columns // side), []).append(row)
        after = torch.empty_like(hidden)
        for together in seen.values():
            ends = torch.tensor([0, len(together)], dtype=torch.int32)
            turned = tuple(each[together] for each in rotary)
            after[together] = block(hidden[together], cu_seqlens=ends, position_embeddings=turned)
        hidden = after
        if number in getattr(tower, "deepstack_visual_indexes", []):
            merger = tower.deepstack_merger_list[tower.deepstack_visual_indexes.index(number)]
            levels.append(merger(hidden))
    if hasattr(tower, "downsample"):
        squares = tower.post_layernorm(hidden).view(-1, merge, merge, hidden.shape[-1]).permute(0, 3, 1, 2)
        hidden = tower.downsample(squares).flatten(1)
    return torch.stack([tower.merger(hidden), *levels])


def _position(tower: Any, place: tuple[int, int], sides: tuple[int, int]) -> Tensor:
    """The position embedding of a patch: the table, laid over the slice corner on corner, at its place."""
    table = tower.pos_embed.weight.view(tower.num_grid_per_side, tower.num_grid_per_side, -1)
    (y, x), last = place, tower.num_grid_per_side - 1
    at = [each * last / max(1, side - 1) for each, side in zip((y, x), sides, strict=True)]
    (top, below), (left, right) = ((int(each), min(int(each) + 1, last)) for each in at)
    down, across = at[0] - top, at[1] - left
    upper = (1 - across) * table[top, left] + across * table[top, right]
    lower = (1 - across) * table[below, left] + across * table[below, right]
    return (1 - down) * upper + down * lower
