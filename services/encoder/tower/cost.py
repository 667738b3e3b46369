"""What a temporal slice costs a vision tower, by the tower's sizes: what ranks share their work out by.

It knows neither torch nor families, and counts multiplications where a device would count seconds.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TowerSizes:
    """hidden: width of a patch; patch_weights, token_weights: weights that each patch, each merged token meets once.

    full_layers: those whose patches attend to all of their slice; in the windowed_layers they do to at most
    window_patches.
    """

    hidden: int
    patch_weights: int
    token_weights: int
    full_layers: int
    windowed_layers: int = 0
    window_patches: int = 0


def slice_cost(sizes: TowerSizes, tokens: int, patches: int) -> int:
    """Multiplications in the forward of one slice of so many merged tokens, and of so many patches before merging.

        patches · patch_weights + tokens · token_weights
        + 2 · hidden · patches · (full_layers · patches + windowed_layers · min(window_patches, patches))

    The first line is linear; so is attention within windows; that over the whole slice is quadratic. 2: a patch is
    multiplied with every key that it sees, and what comes of it with that key's value.
    """
    seen = sizes.full_layers * patches + sizes.windowed_layers * min(sizes.window_patches, patches)
    return patches * sizes.patch_weights + tokens * sizes.token_weights + 2 * sizes.hidden * patches * seen
