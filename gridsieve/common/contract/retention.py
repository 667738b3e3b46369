"""The pruning methods, where each acts, and how many tokens it keeps.

The count follows from grid, rate, method and modality, or is bounded by them where a threshold decides. It is known
before anything is decoded, so admission and the size of the KV cache rely on it. Methods after the tower rank its
embeddings (`services/encoder/pruning/methods.py`). Those before it rank pixels (`services/preprocessing/pruning/`), and
the tower runs over the kept tokens alone.
Sources: Efficient Video Sampling, arXiv 2510.14624; VidCom2, arXiv 2505.14454; V-CAST, arXiv 2603.27650. The floors
and the exact arithmetic are Gridsieve's own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

from gridsieve.common.contract.errors import InvalidRequest, PeerContract
from gridsieve.common.contract.plan import Grid, Int32Array, Modality

EVS = "evs"
EVS_CAUSAL = "evs_causal"
VIDCOM2 = "vidcom2"
VCAST = "vcast"
RANDOM = "random"
PIXEL_CHANGE = "pixel_change"
NONE = "none"
METHODS = (EVS, EVS_CAUSAL, VIDCOM2, VCAST, RANDOM, PIXEL_CHANGE, NONE)
# These methods choose tokens by pixels, before the vision tower runs.
BEFORE_TOWER = (PIXEL_CHANGE,)
AFTER_TOWER = tuple(method for method in METHODS if method not in BEFORE_TOWER)
# The threshold of `pixel_change` that is suggested. Measured: docs/pruning.md.
AUTO_THRESHOLD = 0.1
# Of the config of checkpoints that were trained with EVS: the rate that they are to be used with.
TRAINED_RATE = "video_pruning_rate"
WHY_NOT_BEFORE = "the vision tower of this model reads whole frames"
# Those that keep at least one token of each slice, and need not keep slice 0.
BY_SLICE = (VIDCOM2, VCAST)


@dataclass(frozen=True, slots=True)
class ItemPruning:
    """How one media item is pruned.

    rate: share of a video's tokens to drop, 0 ≤ rate < 1; taken as its shortest decimal.
    method: one of METHODS.
    seed: of `random`; None: 0.
    threshold: of the methods before the tower: what changed by less is dropped, and at least the share `rate` in any
        case, so that num_kept is a bound; None: `rate` alone decides.
    first_slice: tokens of earlier slices are dropped. Above 0 only with a threshold and without a rate.
    reference: what was last shown of each place, of `reference_bytes`. The slices from `first_slice` on are compared
        with it; if it is empty, with the slice before `first_slice`.
    Raises InvalidRequest for a value outside its range, an unknown method, and a threshold of another method.
    """

    rate: float = 0.0
    method: str = EVS
    seed: int | None = None
    threshold: float | None = None
    first_slice: int = 0
    reference: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.rate) and 0 <= self.rate < 1):
            raise InvalidRequest(field="pruning.rate", limit="at least 0 and below 1", value=self.rate)
        if self.method not in METHODS:
            raise InvalidRequest(field="pruning.method", limit=f"one of {', '.join(METHODS)}", value=self.method)
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise InvalidRequest(field="pruning.seed", limit="at least 0 and below 2^63", value=self.seed)
        if self.threshold is not None:
            if self.method not in BEFORE_TOWER:
                text = f"is for {', '.join(BEFORE_TOWER)}, the method is {self.method}"
                raise InvalidRequest(text, field="pruning.threshold", value=self.threshold)
            if not (math.isfinite(self.threshold) and 0 <= self.threshold < 1):
                limit = "at least 0 and below 1"
                raise InvalidRequest(field="pruning.threshold", limit=limit, value=self.threshold)

    @property
    def drops(self) -> bool:
        """Whether it may drop tokens of a video."""
        return self.method != NONE and (self.rate > 0 or self.threshold is not None)


# The pruning that is suggested where a request names neither a rate nor a threshold. It drops only tokens whose pixels
# changed by less than the threshold, so the number of dropped tokens follows from the video.
SUGGESTED = ItemPruning(method=PIXEL_CHANGE, threshold=AUTO_THRESHOLD)


def usual_method(methods: Sequence[str], config: Mapping[str, Any]) -> str:
    """The method of a rate that comes without one: `pixel_change` where the model takes it, else `evs`; `evs` of
    checkpoints that were trained with it.

    methods: the methods that the model takes. config: the checkpoint's config.json.
    """
    return EVS if PIXEL_CHANGE not in methods or config.get(TRAINED_RATE) else PIXEL_CHANGE


def named_method(method: str | None, threshold: float | None, usual: str = EVS) -> str:
    """The method that was named, or else meant: `pixel_change` where there is a threshold, else the usual one."""
    return method or (usual if threshold is None else PIXEL_CHANGE)


def method_of(pruning: ItemPruning, modality: Modality) -> str:
    """The method that metrics count an item under: `none` for images and sounds, and where nothing is dropped."""
    return pruning.method if modality is Modality.VIDEO and pruning.drops else NONE


def chosen_before_tower(grid: Grid, pruning: ItemPruning, modality: Modality) -> bool:
    """Whether the tower computes only a part of an item's tokens, because a method before it chose them."""
    if method_of(pruning, modality) not in BEFORE_TOWER:
        return False
    return pruning.threshold is not None or num_kept(grid, pruning) < grid.tokens


def num_kept(grid: Grid, pruning: ItemPruning, modality: Modality = Modality.VIDEO) -> int:
    """Number of tokens that are kept: ⌊t·h·w·(1 − rate)⌋, but at least a floor; all tokens of an image or a sound.
    The largest number that may be, where there is a threshold.

    The floor is slice 0, h·w tokens; for `vidcom2` and `vcast` it is one token per slice, t tokens. `evs_causal` keeps
    slice 0 and max(1, ⌊h·w·(1 − rate)⌋) tokens of every other. Slices before `first_slice` do not count.
    """
    if modality is not Modality.VIDEO or pruning.method == NONE:
        return grid.tokens
    if pruning.method == EVS_CAUSAL:
        return grid.slice_tokens + (grid.t - 1) * causal_slice_tokens(grid, pruning.rate)
    floor = grid.t if pruning.method in BY_SLICE else grid.slice_tokens
    return max(floor, math.floor(grid.tokens * _share_kept(pruning.rate))) - pruning.first_slice * grid.slice_tokens


def reference_bytes(grid: Grid) -> int:
    """The size of what is remembered of the slices of a video: 49 numbers of 16 bits for each token of a slice."""
    return 98 * grid.slice_tokens


def causal_slice_tokens(grid: Grid, rate: float) -> int:
    """How many tokens `evs_causal` keeps of each slice but the first."""
    return max(1, math.floor(grid.slice_tokens * _share_kept(rate)))


def check_kept(
    kept: Int32Array, grid: Grid, num_kept: int, least: int | None = None, among: range | None = None
) -> None:
    """Raises PeerContract unless kept, int32 [K], are K = `num_kept` strictly increasing indices into the grid.

    least: K is from this to `num_kept`. among: those of the grid that they may be; None: all.
    """
    among = among or range(grid.tokens)
    fits = kept.ndim == 1 and (num_kept if least is None else least) <= kept.size <= num_kept
    if not fits or (kept.size and not (kept[0] >= among.start and kept[-1] < among.stop and (np.diff(kept) > 0).all())):
        most = "" if least is None else "at most "
        raise PeerContract(
            f"an item of the grid {grid} must keep {most}{num_kept} tokens, whose indices increase strictly, "
            f"from at least {among.start} to below {among.stop}; got kept of shape {list(kept.shape)}"
        )


def _share_kept(rate: float) -> Fraction:
    return 1 - Fraction(str(rate))
