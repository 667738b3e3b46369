"""The pruning methods, and how many tokens each keeps.

The count follows from grid, rate, method and modality. It is known before anything is encoded, so admission and the
size of the KV cache rely on it. `services/encoder/pruning/methods.py` selects the tokens.
Sources: Efficient Video Sampling, arXiv 2510.14624; VidCom2, arXiv 2505.14454; V-CAST, arXiv 2603.27650. The floors
and the exact arithmetic are Framesieve's own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from framesieve.common.contract.errors import InvalidRequest, PeerContract
from framesieve.common.contract.plan import Grid, Int32Array, Modality

EVS = "evs"
EVS_CAUSAL = "evs_causal"
VIDCOM2 = "vidcom2"
VCAST = "vcast"
RANDOM = "random"
NONE = "none"
METHODS = (EVS, EVS_CAUSAL, VIDCOM2, VCAST, RANDOM, NONE)
# Those that keep at least one token of each slice, and need not keep slice 0.
BY_SLICE = (VIDCOM2, VCAST)


@dataclass(frozen=True, slots=True)
class Pruning:
    """How one media item is pruned.

    rate: share of a video's tokens to drop, 0 ≤ rate < 1; taken as its shortest decimal.
    method: one of METHODS.
    seed: of `random`; None: 0.
    Raises InvalidRequest for a rate outside its range or an unknown method.
    """

    rate: float = 0.0
    method: str = EVS
    seed: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.rate) and 0 <= self.rate < 1):
            raise InvalidRequest(field="pruning.rate", limit="at least 0 and below 1", value=self.rate)
        if self.method not in METHODS:
            raise InvalidRequest(field="pruning.method", limit=f"one of {', '.join(METHODS)}", value=self.method)
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise InvalidRequest(field="pruning.seed", limit="at least 0 and below 2^63", value=self.seed)


def method_of(pruning: Pruning, modality: Modality) -> str:
    """The method that metrics count an item under: `none` for images and at rate 0, where nothing is dropped."""
    return pruning.method if modality is Modality.VIDEO and pruning.rate else NONE


def num_kept(grid: Grid, pruning: Pruning, modality: Modality = Modality.VIDEO) -> int:
    """Number of tokens that are kept: ⌊t·h·w·(1 − rate)⌋, but at least a floor; all tokens of an image.

    The floor is slice 0, h·w tokens; for `vidcom2` and `vcast` it is one token per slice, t tokens. `evs_causal` keeps
    slice 0 and max(1, ⌊h·w·(1 − rate)⌋) tokens of every other.
    """
    if modality is Modality.IMAGE or pruning.method == NONE:
        return grid.tokens
    if pruning.method == EVS_CAUSAL:
        return grid.slice_tokens + (grid.t - 1) * causal_slice_tokens(grid, pruning.rate)
    floor = grid.t if pruning.method in BY_SLICE else grid.slice_tokens
    return max(floor, math.floor(grid.tokens * _share_kept(pruning.rate)))


def causal_slice_tokens(grid: Grid, rate: float) -> int:
    """How many tokens `evs_causal` keeps of each slice but the first."""
    return max(1, math.floor(grid.slice_tokens * _share_kept(rate)))


def check_kept(kept: Int32Array, grid: Grid, num_kept: int) -> None:
    """Raises PeerContract unless kept, int32 [K], are K = `num_kept` strictly increasing indices into the grid."""
    if kept.shape != (num_kept,) or kept[0] < 0 or kept[-1] >= grid.tokens or bool((np.diff(kept) <= 0).any()):
        raise PeerContract(
            f"an item of the grid {grid} must keep {num_kept} tokens, whose indices increase strictly, from at least 0 "
            f"to below {grid.tokens}; got kept of shape {list(kept.shape)}"
        )


def _share_kept(rate: float) -> Fraction:
    return 1 - Fraction(str(rate))
