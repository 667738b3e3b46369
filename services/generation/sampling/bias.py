"""Values that are added to the logits of some tokens, for a whole batch at once.

This module knows neither requests nor sampling, nor where the values come from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.generation.to_device import to_device

# Puts a token behind all others at any temperature. Finite: where a grammar allows no other token, it is still chosen.
FORBIDDEN = -1e6
ANY = -1


@dataclass(frozen=True, slots=True)
class Bias:
    """What one answer adds to logits in one step. Values of a token that occurs several times add up.

    token_ids: int64 [S]. values: float32 [S].
    after: int64 [S], the unread token behind which an entry applies; ANY for entries that do not depend on it.
    """

    token_ids: NDArray[np.int64]
    values: NDArray[np.float32]
    after: NDArray[np.int64]

    @classmethod
    def of(cls, token_ids: Sequence[int], values: Sequence[float], after: Sequence[int] = ()) -> Bias:
        """after: empty if no entry depends on an unread token."""
        unread = np.array(after, np.int64) if after else np.full(len(token_ids), ANY, np.int64)
        return cls(np.array(token_ids, np.int64), np.array(values, np.float32), unread)


def add_bias(scores: Tensor, biases: Mapping[int, Bias], unread: Mapping[int, Tensor] = {}) -> None:
    """Adds biases, by row, to scores, float32 [B, V], contiguous, in place. Only affected tokens are read and written.

    unread: of rows whose last token is still on the device, that token, int64 [].
    """
    rows = np.repeat(np.array(list(biases), np.int64), [one.token_ids.size for one in biases.values()])
    places = rows * scores.shape[-1] + np.concatenate([one.token_ids for one in biases.values()])
    values = to_device(np.concatenate([one.values for one in biases.values()]), scores.device)
    late = [row for row in biases if row in unread]
    if late:
        late_rows = to_device(np.array(late, np.int64), scores.device)
        latest = torch.full_like(scores[:, 0], ANY, dtype=torch.int64)
        latest.index_copy_(0, late_rows, torch.stack([unread[row] for row in late]))
        after = to_device(np.concatenate([one.after for one in biases.values()]), scores.device)
        values = values * ((after == ANY) | (after == latest[to_device(rows, scores.device)]))
    scores.view(-1).index_add_(0, to_device(places, scores.device), values)
