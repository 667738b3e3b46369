"""DESIGN's formulas written down a second time, plainly and slowly: what the law's tests compare with.

Nothing here imports the services. Loops over tokens are meant: they read like the formulas.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn


@dataclass(frozen=True)
class Text:
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Item:
    """An image (time_step None) or a video, its merged embeddings [t·h·w, D] and how it is pruned."""

    t: int
    h: int
    w: int
    time_step: Fraction | None
    embeds: NDArray[np.float32]
    rate: float = 0.0
    method: str = "evs"

    @property
    def tokens(self) -> int:
        return self.t * self.h * self.w

    @property
    def kept_count(self) -> int:
        if self.time_step is None or self.method == "none":
            return self.tokens
        return max(self.h * self.w, math.floor(self.tokens * (1 - Fraction(str(self.rate)))))


@dataclass(frozen=True)
class Expected:
    """The gathered sequence: ids [n], rows [n] of (item, token of its grid) or None, positions [3, n], full maximum."""

    ids: list[int]
    rows: list[tuple[int, int] | None]
    positions: list[tuple[int, int, int]]
    full_tokens: int
    full_maximum: int

    @property
    def delta(self) -> int:
        return self.full_maximum + 1 - len(self.ids)


def kept_tokens(item: Item, seed: int = 0) -> list[int]:
    """Which tokens of the grid stay: for evs by the change since the slice before, for random any."""
    if item.kept_count == item.tokens:
        return list(range(item.tokens))
    if item.method == "random":
        return sorted(np.random.default_rng(seed).permutation(item.tokens)[: item.kept_count].tolist())
    slice_tokens = item.h * item.w
    scores = []
    for token in range(item.tokens):
        if token < slice_tokens:
            scores.append(math.inf)
            continue
        now, before = item.embeds[token].astype(np.float64), item.embeds[token - slice_tokens].astype(np.float64)
        change = 1 - now @ before / (np.linalg.norm(now) * np.linalg.norm(before))
        scores.append(round(change * 2**16) / 2**16)
    best = sorted(range(item.tokens), key=lambda token: (-scores[token], token))[: item.kept_count]
    return sorted(best)


def expected_sequence(parts: Sequence[Text | Item], kept: Sequence[Sequence[int]], pad_id: int) -> Expected:
    """What the language model must read, from the parts of a prompt and the tokens that each item keeps."""
    ids: list[int] = []
    rows: list[tuple[int, int] | None] = []
    positions: list[tuple[int, int, int]] = []
    start, maximum, full_tokens, item_index = 0, -1, 0, 0
    for part in parts:
        if isinstance(part, Text):
            for number, token_id in enumerate(part.ids):
                ids.append(token_id)
                rows.append(None)
                positions.append((start + number,) * 3)
                maximum = start + number
            full_tokens += len(part.ids)
        else:
            for token in range(part.tokens):
                i, j, k = token // (part.h * part.w), token // part.w % part.h, token % part.w
                place = (start + math.floor(i * (part.time_step or 0)), start + j, start + k)
                maximum = max(maximum, *place)
                if token in kept[item_index]:
                    ids.append(pad_id)
                    rows.append((item_index, token))
                    positions.append(place)
            full_tokens += part.tokens
            item_index += 1
        start = maximum + 1
    return Expected(ids, rows, positions, full_tokens, maximum)


@torch.no_grad()
def expected_logprobs(
    text_model: nn.Module, lm_head: nn.Module, expected: Expected, items: Sequence[Item], answer: Sequence[int]
) -> Tensor:
    """Log-probabilities of each token of an answer, teacher-forced: float32 [len(answer), V].

    One unchunked forward of transformers' own text model over the gathered sequence and the answer.
    """
    ids = [*expected.ids, *answer[:-1]]
    embeds = text_model.get_input_embeddings()(torch.tensor(ids))
    for row, source in enumerate(expected.rows):
        if source is not None:
            embeds[row] = torch.from_numpy(items[source[0]].embeds[source[1]])
    positions = [*expected.positions, *[(len(expected.ids) + i + expected.delta,) * 3 for i in range(len(answer) - 1)]]
    hidden = text_model(
        inputs_embeds=embeds[None], position_ids=torch.tensor(positions).T[:, None], use_cache=False
    ).last_hidden_state[0]
    return lm_head(hidden[len(expected.ids) - 1 :]).log_softmax(dim=-1)
