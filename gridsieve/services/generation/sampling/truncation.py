"""Which tokens top-k and then top-p keep, for a whole batch at once: the lowest score of each row that is kept.

A small top-k is ranked. Any other floor is searched for without sorting the vocabulary, and without a wait for the
device: digit by digit of the distance from the row's maximum, whose bits are ordered as its values are.

    distance, float32:   [ 11 bits | 10 bits | 10 bits ]      digit 1: what all tokens of each digit weigh, added up
                           digit 1   digit 2   digit 3          from the nearest; the floor's is where enough is reached
                                                              digit 2: the same among the tokens of that digit, …

Weights are whole numbers, so that their sums do not depend on the order in which a device adds, nor on the batch. This
module knows neither requests nor sampling.
Source: selection by radix, as in torch's `topk`, with probabilities in place of counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from gridsieve.services.compute.transfers import to_device

# How many of the most likely tokens are ranked at most. On a CPU, a nucleus without top-k is first looked for among so
# many: there ranking them is several times faster than the search.
_RANKED = 1024

_DIGITS = ((20, 11), (10, 10), (0, 10))  # where each begins, and its bits
_WEIGHT_BITS = 61  # of what all tokens of a row weigh together
_FLOAT32_BIAS, _FLOAT32_FRACTION_BITS = 127, 23

_Find: TypeAlias = Callable[[Tensor, Sequence[int], Sequence[float]], Tensor]


def floors(scores: Tensor, top_ks: Sequence[int], top_ps: Sequence[float]) -> Tensor:
    """The lowest score that each row keeps, float32 [B, 1], or less where it keeps everything.

    scores: float32 [B, V], the maximum of each row is 0. top_ks, top_ps: for each row; 0 and 1 keep everything.
    Tied tokens are kept or dropped together.
    """
    size = scores.shape[-1]
    found = torch.full_like(scores[:, :1], -torch.inf)

    def find(rows: Sequence[int], how: _Find) -> None:
        if rows:
            at = to_device(np.array(rows, np.int64), scores.device)
            found[at] = how(scores[at], [top_ks[row] for row in rows], [top_ps[row] for row in rows])

    limited = [row for row, top_k in enumerate(top_ks) if top_ps[row] < 1 or 0 < top_k < size]
    ranked = [row for row in limited if 0 < top_ks[row] <= _RANKED]
    searched = [row for row in limited if not 0 < top_ks[row] <= _RANKED]
    find(ranked, _ranked)
    if scores.is_cpu:
        find([row for row in searched if not top_ks[row]], _ranked)
        searched = [row for row in searched if top_ks[row] or found[row].isnan()]
    find(searched, _searched)
    return found


def _ranked(scores: Tensor, top_ks: Sequence[int], top_ps: Sequence[float]) -> Tensor:
    """The floors from a ranking of the most likely tokens; NaN without top-k where the nucleus reaches beyond it.

    Sums are float64, so that a floor does not depend on the batch.
    """
    size = scores.shape[-1]
    among = min(size, max(top_ks) or _RANKED)
    ranked = scores.topk(among, dim=-1).values  # [B, among]
    places = column([(top_k or size) - 1 for top_k in top_ks], scores, np.int64)
    least = ranked.gather(-1, places.clamp(max=among - 1)).masked_fill(places >= size - 1, -torch.inf)
    kept = scores.masked_fill(scores < least, -torch.inf)
    shares = column(top_ps, scores, np.float64)
    wanted = shares * kept.exp().sum(dim=-1, keepdim=True, dtype=torch.float64)
    held = ranked.masked_fill(ranked < least, -torch.inf).exp().cumsum(dim=-1, dtype=torch.float64)
    last = (held < wanted).sum(dim=-1, keepdim=True)
    nucleus = ranked.gather(-1, last.clamp(max=among - 1)).masked_fill(shares >= 1, -torch.inf)
    if among < size:
        nucleus = nucleus.masked_fill((last == among) & (places >= among), torch.nan)
    return least.maximum(nucleus)


def _searched(scores: Tensor, top_ks: Sequence[int], top_ps: Sequence[float]) -> Tensor:
    """The floors of any rows, of which nothing is sorted."""
    size = scores.shape[-1]
    keys = scores.abs().view(torch.int32)
    shares = column(top_ps, scores, np.float64)
    counts = [top_k if 0 < top_k < size else size for top_k in top_ks]
    furthest: Tensor | None = None
    if min(counts) < size:
        ones = torch.ones_like(keys[:, :1], dtype=torch.int64).expand_as(keys)
        furthest = _reached(keys, ones, column(counts, scores, np.int64))
    weights = _weights(scores, keys, furthest)
    nucleus = _reached(keys, weights, (shares * weights.sum(dim=-1, keepdim=True)).ceil().long())
    if furthest is not None:
        nucleus = torch.where(shares < 1, nucleus, furthest)
    return nucleus.view(torch.float32).neg()


def _weights(scores: Tensor, keys: Tensor, furthest: Tensor | None) -> Tensor:
    """Whole numbers that are as tokens' probabilities are, 0 where the key is beyond the furthest: int64 [B, V]."""
    odds = scores.exp()
    if furthest is not None:
        odds.masked_fill_(keys > furthest, 0)
    _, exponents = torch.frexp(odds.sum(dim=-1, keepdim=True, dtype=torch.float64))  # of a power of two above the sum
    bits = (_FLOAT32_BIAS + _WEIGHT_BITS - exponents.clamp(0, _WEIGHT_BITS)) << _FLOAT32_FRACTION_BITS
    return odds.mul_(bits.view(torch.float32)).long()


def _reached(keys: Tensor, weights: Tensor, wanted: Tensor) -> Tensor:
    """The least key of each row up to which its tokens weigh what is wanted: int32 [B, 1].

    keys: int32 [B, V], at least 0. weights: int64 [B, V], at least 0. wanted: int64 [B, 1], at most all of them.
    """
    found = torch.zeros_like(keys[:, :1])
    for begin, bits in _DIGITS:
        count, digits = 1 << bits, keys >> begin
        places = (digits & count - 1).long()
        places.add_(digits >> bits != found, alpha=count)  # tokens of other digits before this one are added up apart
        sums = wanted.new_zeros(len(wanted), 2 * count).scatter_add_(-1, places, weights)[:, :count]
        upto = sums.cumsum(dim=-1)
        digit = (upto < wanted).sum(dim=-1, keepdim=True).clamp(max=count - 1)
        wanted = wanted - (upto - sums).gather(-1, digit)
        found = (found << bits) + digit.int()
    return found


def column(values: Sequence[float], like: Tensor, dtype: type[np.generic]) -> Tensor:
    """[B, 1], on the device of `like`."""
    return to_device(np.array(values, dtype), like.device)[:, None]
