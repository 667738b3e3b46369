"""VidCom2: distinctive slices of a video keep more tokens, and each slice keeps its most distinctive tokens.

    tokens ─▶ the half of the channels with the least variance ─▶ unit length
                 ├─▶ similarity to the video's centre ─▶ mean over each slice ─▶ softmax ─▶ budget of the slice
                 └─▶ similarity to the video's centre + to its slice's centre ─▶ the least similar are kept

A token with a value that is not finite, or so large that its length overflows float32, is computed as zeros and dropped
first.
Source: arXiv 2505.14454; the exact total, the minimum of one token per slice and the order of ties are Gridsieve's
own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gridsieve.common.contract.plan import Grid
from gridsieve.common.contract.retention import ItemPruning, num_kept
from gridsieve.services.encoder.pruning.ranking import finite_spans, finite_tokens, keep_best_of_slices, slice_budgets

_WIDTHS = (2**-3, 2**-2, 2**-1, 1.0, 2.0)
_TEMPERATURE = 0.01
# Shorter tokens have no direction.
_LEAST_LENGTH = 1e-12


def vidcom2_scores(embeds: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Each token's similarity to its video's centre, and the sum of that and its similarity to its slice's centre.

    embeds: (t·h·w, D), any float dtype; scored in float32. Returns float32 (t, h·w) each; tokens that are not finite
    are +inf in the second.

    With x a token and n its length over the steady channels, its distance to a centre c of these channels is
    |x/n|² − 2·x·c/n + |c|². So tokens are read by products with vectors alone, and no unit token is written.
    """
    slices = embeds.view(grid.t, grid.slice_tokens, -1)
    finite = finite_tokens(slices)
    steady = _steady_channels(slices, finite)
    inverses, centres = _unit_tokens(slices, finite, steady)
    centre = centres.mean(0, dtype=torch.float64).float().expand_as(centres)
    to_video, to_both = (torch.empty(slices.shape[:2], device=slices.device) for _ in range(2))
    for span, values in finite_spans(slices, finite):
        both = torch.stack([centre[span], centres[span]], dim=-1)  # (n, D, 2)
        products = values @ both * inverses[span, :, None]
        lengths = (inverses[span, :, None] > 0) + both.square().sum(1, keepdim=True)
        near = _similarity(lengths - 2 * products)
        to_video[span] = near[..., 0]
        to_both[span] = torch.where(finite[span], near.sum(-1), torch.inf)
    return to_video, to_both


def vidcom2_kept(scores: Sequence[Tensor], grid: Grid, pruning: ItemPruning) -> Tensor:
    """Indices of the tokens that VidCom2 keeps.

    scores: from `vidcom2_scores`.
    Returns int32 (K,), strictly increasing, K = num_kept(grid, pruning), at least one token per slice.
    """
    to_video, to_both = scores
    count = num_kept(grid, pruning)
    quotas = _quotas(to_video.mean(1, dtype=torch.float64), pruning.rate, grid.slice_tokens)
    budgets = slice_budgets(quotas, grid.slice_tokens, count)
    return keep_best_of_slices(-to_both, budgets, count)


def _quotas(to_video: Tensor, rate: float, slice_tokens: int) -> Tensor:
    """Real-valued budgets: the less similar a slice is to its video, the larger. to_video: slice means, (t,)."""
    distinctive = torch.softmax(-to_video / _TEMPERATURE, dim=0)
    return (1 - rate) * (1 + distinctive - distinctive.mean()) * slice_tokens


def _steady_channels(slices: Tensor, finite: Tensor) -> Tensor:
    """The half of the channels with the least variance over the video, as 1 and 0: float32 (D,); ties to the lower."""
    width = slices.shape[2]
    sums, squares = (torch.zeros(width, dtype=torch.float64, device=slices.device) for _ in range(2))
    # A mean to subtract first: rounded back from float64, so that a constant channel has a variance of exactly 0.
    first = slices[0].masked_fill(~finite[0, :, None], 0).mean(0, dtype=torch.float64).float()
    for _, values in finite_spans(slices, finite):
        differences = values - first
        sums += differences.sum((0, 1))
        squares += differences.square_().sum((0, 1))
    variance = squares - sums.square() / finite.numel()
    return torch.zeros(width, device=slices.device).index_fill_(0, variance.argsort(stable=True)[: width // 2], 1)


def _unit_tokens(slices: Tensor, finite: Tensor, steady: Tensor) -> tuple[Tensor, Tensor]:
    """1 / length of each token over the steady channels, float32 (t, h·w), 0 for tokens of no length; and the mean of
    each slice's unit tokens, float32 (t, D), 0 in other channels.
    """
    inverses = torch.empty(slices.shape[:2], device=slices.device)
    centres = torch.empty(len(slices), slices.shape[2], device=slices.device)
    for span, values in finite_spans(slices, finite):
        values = values * steady
        lengths = values.norm(dim=-1)
        inverses[span] = torch.where(lengths > _LEAST_LENGTH, 1 / lengths, 0)
        centres[span] = (inverses[span, None] @ values)[:, 0] / slices.shape[1]
    return inverses, centres


def _similarity(distances: Tensor) -> Tensor:
    """The sum of Gaussian kernels of several widths, of squared distances."""
    return torch.stack([torch.exp(-distances / (2 * width)) for width in _WIDTHS]).sum(0)
