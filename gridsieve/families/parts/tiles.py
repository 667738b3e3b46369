"""Checks of plans by their frames and grids, for `Tower.arrange`."""

from __future__ import annotations

from gridsieve.common.contract.plan import MediaPlan
from gridsieve.services.encoder.tower.patches import PatchShape
from gridsieve.services.encoder.tower.tower import Arrangement


def one_after_the_other(patches: PatchShape, plan: MediaPlan) -> Arrangement:
    """The arrangement of frames and tiles of one size. Raises ValueError for a plan that these frames do not make."""
    height, width = plan.frames.size_px
    if patches.grid(height, width) is None:
        raise ValueError(f"they have {height}×{width} pixels")
    tokens = patches.tokens((1, height, width))
    if plan.grid.tokens != plan.frames.count * tokens:
        raise ValueError(f"{plan.frames.count} frames have {tokens} tokens each, the grid {plan.grid}")
    return Arrangement(tokens)


def check_plan(plan: MediaPlan, grid: tuple[int, int, int], frames: int) -> None:
    if (plan.grid.t, plan.grid.h, plan.grid.w) != grid or plan.frames.count != frames:
        raise ValueError(f"{plan.frames.count} frames and {plan.grid} are not {frames} and {grid}")
