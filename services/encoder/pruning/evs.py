"""Efficient Video Sampling: how much a token differs from the one at its place a slice earlier.

Source: arXiv 2510.14624, embedding variant; the rounding and the place of NaN are Framesieve's own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from common.contract.plan import Grid
from services.encoder.pruning.ranking import rounded, spans


def evs_scores(embeds: Tensor, grid: Grid) -> Tensor:
    """How much each token differs from the one at its place a slice earlier.

    embeds: (t·h·w, D), any float dtype; scored in float32.
    Returns float32 (t·h·w,), multiples of 2⁻¹⁶; slice 0 is +inf, NaN is −inf.
    """
    slices = embeds.view(grid.t, grid.slice_tokens, -1)
    scores = torch.full((grid.t, grid.slice_tokens), torch.inf, device=embeds.device)
    for span in spans(slices, first=1):
        pairs = slices[span.start - 1 : span.stop].float()
        change = rounded(1 - F.cosine_similarity(pairs[1:], pairs[:-1], dim=-1))
        scores[span] = torch.where(change.isnan(), -torch.inf, change)
    return scores.view(-1)
