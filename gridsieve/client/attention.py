"""What the tokens of an answer attended to: shares of the attention on each media item, and on each kept token.

It knows nothing of protobuf (see `events`). docs/attention.md says what the weights are means of.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gridsieve.common.contract.plan import Grid, Int32Array

Float32Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class MediaAttention:
    """The attention of an answer's n tokens on one image, video or sound.

    kept: int32 [K], the tokens of its grid that the model saw.
    weights: float32 [t, h, w], of each token of the grid, mean over the n tokens; 0 where pruned.
    token_shares: float32 [n], on the item as a whole, of each token of the answer.
    token_weights: float32 [n, K], of each token of the answer on each kept one; None where that would be too large.
    """

    grid: Grid
    kept: Int32Array
    weights: Float32Array
    token_shares: Float32Array
    token_weights: Float32Array | None

    @property
    def share(self) -> float:
        """Of the answer's attention, 0 to 1."""
        return float(self.weights.sum())

    def of_token(self, index: int) -> Float32Array:
        """float32 [t, h, w]: `weights` of one token of the answer. Raises ValueError where they are not known."""
        if self.token_weights is None:
            raise ValueError("the answer and its media are too long for weights of each token (docs/attention.md)")
        return over_grid(self.grid, self.kept, self.token_weights[index])


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    """What an answer attended to (`Sampling.attention`).

    media: of each image, video and sound, in the prompt's order. text_share: on all other tokens, 0 to 1.
    tokens: the text of each of the answer's n tokens, decoded by itself.
    """

    media: tuple[MediaAttention, ...]
    text_share: float
    tokens: tuple[str, ...]


def over_grid(grid: Grid, kept: Int32Array, weights: Float32Array) -> Float32Array:
    """Weights of the kept tokens, float32 [K], at their places: float32 [t, h, w], 0 elsewhere."""
    flat = np.zeros(grid.tokens, np.float32)
    flat[kept] = weights
    return flat.reshape(grid.t, grid.h, grid.w)
