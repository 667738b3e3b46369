"""Repetition, presence and frequency penalties for a whole batch at once.

    logit  ─▶  ÷ repetition if positive, × repetition if negative      tokens of the prompt and of the answer
           ─▶  − presence − frequency · count                          tokens of the answer, which occur `count` times

The repetition penalty comes first, because transformers' processor applies to raw logits; transformers has no processor
for the other two, which are subtracted from the result. Temperature comes after all of them. This module knows neither
requests nor sampling.
Sources: CTRL, arXiv 1909.05858, section 4.1 (repetition); OpenAI's API reference (presence and frequency).
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gridsieve.common.contract.plan import Int32Array
from gridsieve.services.compute.transfers import to_device

_LEAST_REPETITION = 1e-30  # dividing by less would overflow float32


class Penalties:
    """The penalties of one answer, and the tokens that they apply to."""

    def __init__(self, repetition: float, presence: float, frequency: float, prompt_ids: Int32Array) -> None:
        """repetition: above 0, 1 is neutral; presence, frequency: 0 is neutral.

        prompt_ids: int32 [N]. Only the set of tokens matters, so the full or the pruned prompt.
        """
        self.repetition = max(repetition, _LEAST_REPETITION)
        self.presence = presence
        self.frequency = frequency
        # The first entries are used, one for each place; the arrays double when they are full.
        self._token_ids = np.unique(prompt_ids if repetition != 1 else prompt_ids[:0]).astype(np.int64)
        self._counts = np.zeros(self._token_ids.size, np.float32)
        self._places = {token_id: place for place, token_id in enumerate(self._token_ids.tolist())}

    def copy(self) -> Penalties:
        other = copy(self)
        other._token_ids, other._counts, other._places = self._token_ids.copy(), self._counts.copy(), {**self._places}
        return other

    @property
    def token_ids(self) -> NDArray[np.int64]:
        """The distinct tokens that the penalties apply to: int64 [S]."""
        return self._token_ids[: len(self._places)]

    @property
    def counts(self) -> NDArray[np.float32]:
        """How often each of `token_ids` occurs in the answer: float32 [S]."""
        return self._counts[: len(self._places)]

    def count(self, token_id: int) -> None:
        """Counts a token of the answer."""
        place = self._places.setdefault(token_id, len(self._places))
        if place == self._counts.size:
            self._token_ids = np.pad(self._token_ids, (0, place + 1))
            self._counts = np.pad(self._counts, (0, place + 1))
        self._token_ids[place] = token_id
        self._counts[place] += 1


def penalise(scores: Tensor, penalties: Mapping[int, Penalties]) -> None:
    """Applies penalties, by row, to scores, float32 [B, V], in place. Only affected tokens are read and written."""
    sizes = [one.counts.size for one in penalties.values()]
    at = to_device(np.array(list(penalties), np.int64), scores.device)
    rows = to_device(np.repeat(np.array(list(penalties), np.int64), sizes), scores.device)
    token_ids = to_device(np.concatenate([one.token_ids for one in penalties.values()]), scores.device)
    counts = to_device(np.concatenate([one.counts for one in penalties.values()]), scores.device)

    def strength(name: str) -> Tensor:
        values = to_device(np.array([getattr(one, name) for one in penalties.values()], np.float32), scores.device)
        return torch.zeros_like(scores[:, 0]).index_copy_(0, at, values)[rows]

    repetition = strength("repetition")
    values = scores[rows, token_ids]
    values = torch.where(values < 0, values * repetition, values / repetition)
    values -= strength("presence") * (counts > 0)
    values -= strength("frequency") * counts
    scores[rows, token_ids] = values
