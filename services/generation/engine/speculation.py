"""Guesses the next tokens of an answer: what followed the last time that the same few tokens stood in prompt or answer.

    … the red circle moves down …  The red circle        guesses: moves down …
          └──── found again ────┘      └─ the last three

A guess costs a row of the next forward and never changes an answer: it stands only if the model chooses it too. It
knows neither the model nor torch. Source: prompt lookup decoding, `prompt_lookup_num_tokens` of transformers' generate.
"""

from __future__ import annotations

import numpy as np

from services.generation.request.request import Request

# How many tokens must be found again: longer matches first, and one alone says too little.
MATCHED_TOKENS = (3, 2)


def guess(request: Request, most: int) -> tuple[int, ...]:
    """At most `most` tokens that may follow the answer so far, perhaps none."""
    history = np.concatenate([request.rope.text_ids, np.array(request.output_ids, np.int32)])
    for length in MATCHED_TOKENS:
        tail = history[-length:]
        found = np.ones(max(0, history.size - length), np.bool_)
        for place, token in enumerate(tail):
            found &= history[place : place + found.size] == token
        if found.any():
            first = int(np.flatnonzero(found)[-1]) + length
            follows = history[first : first + most]
            media = np.flatnonzero(follows < 0)
            return tuple(follows[: media[0] if media.size else most].tolist())
    return ()
