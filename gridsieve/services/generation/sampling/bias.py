"""Values that are added to the logits of some tokens, for a whole batch at once.

This module knows neither requests nor sampling, nor where the values come from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gridsieve.services.compute.transfers import to_device

# Puts a token below all others at any temperature. Finite: where a grammar allows no other token, it is still chosen.
FORBIDDEN_BIAS = -1e6


@dataclass(frozen=True, slots=True)
class Bias:
    """What one answer adds to logits in one step. Values of a token that occurs several times add up.

    token_ids: int64 [S]. values: float32 [S].
    """

    token_ids: NDArray[np.int64]
    values: NDArray[np.float32]

    @classmethod
    def of(cls, token_ids: Sequence[int], values: Sequence[float]) -> Bias:
        return cls(np.array(token_ids, np.int64), np.array(values, np.float32))


def add_bias(scores: Tensor, biases: Mapping[int, Bias]) -> None:
    """Adds biases, by row, to scores, float32 [B, V], contiguous, in place. Reads and writes affected tokens only."""
    rows = np.repeat(np.array(list(biases), np.int64), [one.token_ids.size for one in biases.values()])
    places = rows * scores.shape[-1] + np.concatenate([one.token_ids for one in biases.values()])
    values = to_device(np.concatenate([one.values for one in biases.values()]), scores.device)
    scores.view(-1).index_add_(0, to_device(places, scores.device), values)
