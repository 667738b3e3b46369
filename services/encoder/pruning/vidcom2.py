"""VidCom2: distinctive slices of a video keep more tokens, and each slice keeps its most distinctive tokens.

    tokens ─▶ the half of the channels with the least variance ─▶ unit length
                 ├─▶ similarity to the video's centre ─▶ mean over each slice ─▶ softmax ─▶ budget of the slice
                 └─▶ similarity to the video's centre + to its slice's centre ─▶ the least similar are kept

A token with a value that is not finite is computed as zeros and dropped first.
Source: arXiv 2505.14454; the exact total, the minimum of one token per slice and the order of ties are Framesieve's
own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from common.contract.plan import Grid
from common.contract.retention import Pruning, retained_count
from services.encoder.pruning.ranking import finite_spans, finite_tokens, keep_best_of_slices, slice_budgets

_WIDTHS = (2**-3, 2**-2, 2**-1, 1.0, 2.0)
_TEMPERATURE = 0.01


def vidcom2_scores(embeds: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Each token's similarity to its video's centre, and the sum of that and its similarity to its slice's centre.

    embeds: (t·h·w, D), any float dtype; scored in float32. Returns float32 (t, h·w) each; tokens that are not finite
    are +inf in the second.
    """
    slices = embeds.view(grid.t, grid.slice_tokens, -1)
    finite = finite_tokens(slices)
    return _similarities(slices, finite, _steady_channels(slices, finite))


def vidcom2_kept(scores: Sequence[Tensor], grid: Grid, pruning: Pruning) -> Tensor:
    """Indices of the tokens that VidCom2 keeps.

    scores: from `vidcom2_scores`.
    Returns int32 (K,), strictly increasing, K = retained_count(grid, pruning), at least one token per slice.
    """
    to_video, to_both = scores
    count = retained_count(grid, pruning)
    quotas = _quotas(to_video.mean(1, dtype=torch.float64), pruning.rate, grid.slice_tokens)
    budgets = slice_budgets(quotas, grid.slice_tokens, count)
    return keep_best_of_slices(-to_both, budgets, count)


def _quotas(to_video: Tensor, rate: float, slice_tokens: int) -> Tensor:
    """Real-valued budgets: the less similar a slice is to its video, the larger. to_video: slice means, (t,)."""
    distinctive = torch.softmax(-to_video / _TEMPERATURE, dim=0)
    return (1 - rate) * (1 + distinctive - distinctive.mean()) * slice_tokens


def _steady_channels(slices: Tensor, finite: Tensor) -> Tensor:
    """The half of the channels with the least variance over the video, int64 (⌊D/2⌋,); ties to the lower channel."""
    tokens, width = finite.numel(), slices.shape[2]
    mean, variance = (torch.zeros(width, dtype=torch.float64, device=slices.device) for _ in range(2))
    for _, values in finite_spans(slices, finite):
        mean += values.sum((0, 1), dtype=torch.float64)
    # Divided once and rounded back, so that a constant channel has a variance of exactly 0.
    means = (mean / tokens).float()
    for _, values in finite_spans(slices, finite):
        variance += (values - means).square_().sum((0, 1), dtype=torch.float64)
    return variance.argsort(stable=True)[: width // 2]


def _similarities(slices: Tensor, finite: Tensor, channels: Tensor) -> tuple[Tensor, Tensor]:
    """`vidcom2_scores` over the given channels."""
    centre = torch.zeros(channels.numel(), dtype=torch.float64, device=slices.device)
    for _, values in finite_spans(slices, finite, channels):
        centre += F.normalize(values, dim=-1).sum((0, 1), dtype=torch.float64)
    centre /= finite.numel()
    to_video, to_both = (torch.empty(slices.shape[:2], device=slices.device) for _ in range(2))
    for span, values in finite_spans(slices, finite, channels):
        units = F.normalize(values, dim=-1)
        slice_centres = units.mean(1, keepdim=True, dtype=torch.float64)
        to_video[span] = _similarity(units, centre.float())
        to_slice = _similarity(units, slice_centres.float())
        to_both[span] = torch.where(finite[span], to_video[span] + to_slice, torch.inf)
    return to_video, to_both


def _similarity(units: Tensor, centre: Tensor) -> Tensor:
    """The sum of Gaussian kernels of several widths: (…, D) to (…,)."""
    distances = (units - centre).square().sum(-1)
    return torch.stack([torch.exp(-distances / (2 * width)) for width in _WIDTHS]).sum(0)
