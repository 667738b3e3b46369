"""Proposes draft tokens by prompt lookup: what followed the last few tokens when they occurred before.

    … the red circle moves down …  The red circle        draft tokens: moves down …
          └──── matches ──────┘      └─ the last three

A draft token costs one more row in the next forward and never changes the answer: it is accepted only if the model
samples the same token. This module knows neither the model nor torch.
Source: prompt lookup decoding, `prompt_lookup_num_tokens` of transformers' `generate`.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from gridsieve.services.generation.request.request import Request

# Lengths of the match, tried in this order. A single matching token predicts too little.
MATCHED_TOKENS = (3, 2)


class Drafts(Protocol):
    """Where draft tokens come from."""

    def begin_step(self, sequences: int) -> None:
        """sequences: how many decode in the next step."""

    def propose(self, request: Request, limit: int) -> tuple[int, ...]:
        """At most `limit` tokens that may follow the answer so far, or room for them."""


class PromptLookup:
    """Implements `Drafts`."""

    def begin_step(self, sequences: int) -> None:
        pass

    def propose(self, request: Request, limit: int) -> tuple[int, ...]:
        """Empty if nothing matches. Media rows never match."""
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
