"""What repeating itself costs an answer: repetition, presence and frequency penalties for a whole batch at once.

    logit  ─▶  ÷ repetition where positive, × repetition where negative      tokens of the prompt and of the answer
           ─▶  − presence − frequency · count                                tokens of the answer, `count` times there

Repetition comes first, as transformers' processor sees raw logits; it has no processor for the other two, which are
subtracted from what that leaves. All of them come before temperature. It knows neither requests nor how tokens are
chosen. Sources: CTRL, arXiv 1909.05858, section 4.1 (repetition); OpenAI's API reference (presence and frequency).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from common.contract.plan import Int32Array
from services.generation.to_device import to_device

_LEAST_REPETITION = 1e-30  # what divides by less leaves the range of float32


class Penalties:
    """The penalties of one answer, and the tokens that they fall on."""

    def __init__(self, repetition: float, presence: float, frequency: float, prompt_ids: Int32Array) -> None:
        """repetition: above 0, 1 for none; presence, frequency: 0 for none.

        prompt_ids: int32 [N], the prompt's tokens; only which tokens there are matters, so full or pruned.
        """
        self.repetition = max(repetition, _LEAST_REPETITION)
        self.presence = presence
        self.frequency = frequency
        # int64 [S] without repeats, and how often each stands in the answer, float32 [S].
        self.token_ids = np.unique(prompt_ids if repetition != 1 else prompt_ids[:0]).astype(np.int64)
        self.counts = np.zeros(self.token_ids.size, np.float32)
        self._places = {token_id: place for place, token_id in enumerate(self.token_ids.tolist())}

    def add(self, token_id: int) -> None:
        """Notes a token of the answer."""
        place = self._places.setdefault(token_id, self.counts.size)
        if place == self.counts.size:
            self.token_ids = np.append(self.token_ids, token_id)
            self.counts = np.append(self.counts, np.float32(0))
        self.counts[place] += 1


def penalise(scores: Tensor, penalties: Mapping[int, Penalties]) -> None:
    """Applies them, by row, in place. scores: float32 [B, V]. Only the tokens that penalties fall on are touched."""
    each = list(penalties.values())
    sizes = [one.counts.size for one in each]

    def by_token(values: list[float]) -> Tensor:
        return to_device(np.repeat(np.array(values, np.float32), sizes), scores.device)

    rows = to_device(np.repeat(np.array(list(penalties), np.int64), sizes), scores.device)
    token_ids = to_device(np.concatenate([one.token_ids for one in each]), scores.device)
    counts = to_device(np.concatenate([one.counts for one in each]), scores.device)
    repetition = by_token([one.repetition for one in each])
    values = scores[rows, token_ids]
    values = torch.where(values < 0, values * repetition, values / repetition)
    values -= by_token([one.presence for one in each]) * (counts > 0)
    values -= by_token([one.frequency for one in each]) * counts
    scores[rows, token_ids] = values
