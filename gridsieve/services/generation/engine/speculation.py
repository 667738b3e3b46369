"""Where draft tokens come from. Prompt lookup: what followed the last few tokens when they occurred before.

    … the red circle moves down …  The red circle        draft tokens: moves down …
          └──── matches ──────┘      └─ the last three

A draft token costs one more row in the next forward and never changes the answer: it is accepted only if the model
samples the same token. This module knows neither the model nor torch.
Source: prompt lookup decoding, `prompt_lookup_num_tokens` of transformers' `generate`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from gridsieve.services.generation.request.request import Request

# Lengths of the match, tried in this order. A single matching token predicts too little.
MATCHED_TOKENS = (3, 2)
# In place of a token that a head drafts before the step is launched.
UNKNOWN = -1


class Drafts(Protocol):
    """Where draft tokens come from."""

    def propose(self, limits: Mapping[Request, int]) -> dict[Request, tuple[int, ...]]:
        """For requests that draft, tokens that may follow what was read of their answers, or room for them.

        limits: the most tokens of each request that decodes. A second call before `begin_step` asks the same again.
        """

    def begin_step(self, sequences: int) -> None:
        """A step begins in which so many decode."""


class Room:
    """Implements `Drafts` for a head: room for as many tokens as may be."""

    def propose(self, limits: Mapping[Request, int]) -> dict[Request, tuple[int, ...]]:
        return {request: (UNKNOWN,) * limit for request, limit in limits.items()}

    def begin_step(self, sequences: int) -> None:
        pass


class PromptLookup:
    """Implements `Drafts`. Media rows never match."""

    def propose(self, limits: Mapping[Request, int]) -> dict[Request, tuple[int, ...]]:
        return {request: self._following(request, limit) for request, limit in limits.items()}

    def begin_step(self, sequences: int) -> None:
        pass

    def _following(self, request: Request, limit: int) -> tuple[int, ...]:
        """Empty if nothing matches."""
        history = np.concatenate([request.prompt.text_ids, np.array(request.output_ids, np.int32)])
        for length in MATCHED_TOKENS:
            tail = history[-length:]
            matches = np.ones(max(0, history.size - length), np.bool_)
            for offset, token in enumerate(tail):
                matches &= history[offset : offset + matches.size] == token
            if matches.any():
                first = int(np.flatnonzero(matches)[-1]) + length
                follows = history[first : first + limit]
                media = np.flatnonzero(follows < 0)
                return tuple(follows[: media[0] if media.size else limit].tolist())
        return ()
