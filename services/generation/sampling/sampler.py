"""How the next token is chosen from logits: penalties, temperature and truncation for a whole batch at once.

It knows neither requests nor the model; the rules and their order are those of transformers' logits processors:
penalties (`penalties.py`), then, where a token is drawn, temperature, top-k, top-p, min-p. Of equals, truncation keeps
all or none. Each step is taken for the rows that ask for it, so that nobody pays for a neighbour's options.
A token is drawn by inverting the distribution at one number of the request's own generator, so that an answer depends
on its seed and on no neighbour. Sources: nucleus sampling, arXiv 1904.09751 (top-p); arXiv 2407.01082 (min-p).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.contract.plan import Int32Array
from services.generation.sampling.penalties import Penalties, penalise
from services.generation.to_device import to_device

_NUCLEUS = 1024  # where the likeliest tokens that hold top_p are looked for at first: sorting all is slow


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one answer are chosen, with nothing left open.

    max_new_tokens: at least 1.
    temperature: 0 is greedy.
    top_p, top_k, min_p: truncation of what may be drawn; 1, 0 and 0 keep everything.
    repetition_penalty: above 0; 1 penalises nothing. Greedy answers are penalised too.
    presence_penalty, frequency_penalty: 0 penalises nothing.
    stop: the answer ends before the first of these strings.
    logprobs: whether log-probabilities are wanted; top_logprobs: of how many of the likeliest tokens besides.
    eos_ids: tokens that end the answer.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0
    eos_ids: tuple[int, ...] = ()

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalised(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


@dataclass(frozen=True, slots=True)
class Chosen:
    """One token of an answer.

    logprob: its log-probability, natural and of raw logits; None unless wanted.
    top: the likeliest tokens of the same logits with theirs, the likeliest first, of equals the lower id; empty unless
        wanted.
    """

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class SamplingState:
    """What one answer's choices depend on besides the logits: its generator and the tokens that it has seen."""

    def __init__(self, params: SamplingParams, prompt_ids: Int32Array) -> None:
        """prompt_ids: int32 [N], the prompt's tokens; only which tokens there are matters, so full or pruned."""
        self.params = params
        self.penalties = (
            Penalties(params.repetition_penalty, params.presence_penalty, params.frequency_penalty, prompt_ids)
            if params.penalised
            else None
        )
        self._generator = torch.Generator().manual_seed(params.seed)

    def draw(self) -> float:
        """The next number of the answer's own sequence, uniform in [0, 1)."""
        return float(torch.rand((), dtype=torch.float64, generator=self._generator))


def sample(logits: Tensor, states: Sequence[SamplingState]) -> list[Chosen]:
    """Chooses one token for each row and notes it in the row's state.

    logits: [B, V], any float dtype, one row a state; not changed.
    Returns one a row.
    """
    scores = logits.float()
    token_ids = scores.argmax(dim=-1)
    rows = [row for row, state in enumerate(states) if state.penalties or not state.params.greedy]
    if rows:
        at = _indices(rows, scores)
        token_ids[at] = _choose(scores[at], [states[row] for row in rows])
    chosen = list(map(Chosen, token_ids.tolist()))
    for each, state in zip(chosen, states, strict=True):
        if state.penalties:
            state.penalties.add(each.token_id)
    rows = [row for row, state in enumerate(states) if state.params.logprobs]
    if rows:
        tops = [states[row].params.top_logprobs for row in rows]
        at = _indices(rows, scores)
        told = _with_logprobs(scores[at].log_softmax(dim=-1), token_ids[at], tops)
        for row, each in zip(rows, told, strict=True):
            chosen[row] = each
    return chosen


def truncate(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Scores after temperature, top-k, top-p and min-p, each row by its own parameters; what is cut is −inf.

    scores: float32 [B, V]. Returns float32 [B, V], each row shifted so that its best is 0.
    """
    # The best becomes 0 first: no temperature, however low, divides it to infinity.
    best = scores.amax(dim=-1, keepdim=True)
    coldest = torch.finfo(torch.float32).tiny
    scores = (scores - best) / _column([max(each.temperature, coldest) for each in params], scores)
    floors = torch.full_like(best, -torch.inf)  # what lies below its row's is cut
    for top_k in {each.top_k for each in params if 0 < each.top_k < scores.shape[-1]}:
        at = _indices([row for row, each in enumerate(params) if each.top_k == top_k], scores)
        floors[at] = scores[at].topk(top_k, dim=-1).values[:, -1:]
    rows = [row for row, each in enumerate(params) if each.top_p < 1]
    if rows:
        at, shares = _indices(rows, scores), _column([params[row].top_p for row in rows], scores, np.float64)
        floors[at] = _nucleus_floors(scores[at], floors[at], shares, _NUCLEUS)
    min_ps = _column([math.log(each.min_p) if each.min_p else -math.inf for each in params], scores)
    return scores.masked_fill(scores < floors.maximum(min_ps), -torch.inf)


def _nucleus_floors(scores: Tensor, floors: Tensor, shares: Tensor, among: int) -> Tensor:
    """The least score of the likeliest tokens that hold a share of the probability above the row's floor: [B, 1].

    scores: [B, V], best 0. floors: [B, 1]. shares: float64 [B, 1]. among: how many of the likeliest are looked at.
    """
    among = min(among, scores.shape[-1])
    kept = scores.masked_fill(scores < floors, -torch.inf)
    wanted = shares * kept.exp().sum(dim=-1, keepdim=True, dtype=torch.float64)  # [B, 1]
    ranked = kept.topk(among, dim=-1).values  # [B, among]
    held = ranked.exp().cumsum(dim=-1, dtype=torch.float64)
    last = (held < wanted).sum(dim=-1, keepdim=True)
    least = ranked.gather(-1, last.clamp(max=among - 1))
    beyond = last[:, 0] == among
    if among < scores.shape[-1] and beyond.any():
        least[beyond] = _nucleus_floors(scores[beyond], floors[beyond], shares[beyond], 8 * among)
    return least.maximum(floors)


def _choose(scores: Tensor, states: Sequence[SamplingState]) -> Tensor:
    """One token a row, penalised and drawn as its state says. scores: float32 [B, V], changed. Returns int64 [B]."""
    penalties = {row: state.penalties for row, state in enumerate(states) if state.penalties}
    if penalties:
        penalise(scores, penalties)
    token_ids = scores.argmax(dim=-1)
    drawn = [row for row, state in enumerate(states) if not state.params.greedy]
    if drawn:
        at = _indices(drawn, scores)
        token_ids[at] = _draw(scores[at], [states[row] for row in drawn])
    return token_ids


def _draw(scores: Tensor, states: Sequence[SamplingState]) -> Tensor:
    """One token a row: the first whose cumulative probability passes the row's number. int64 [B]."""
    odds = truncate(scores, [state.params for state in states]).exp()
    cumulative = odds.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    numbers = _column([state.draw() for state in states], scores, np.float64)
    # Below the total even after rounding, so that a token without probability is never reached.
    wanted = torch.minimum(numbers * total, torch.nextafter(total, torch.zeros_like(total)))
    chosen = torch.searchsorted(cumulative, wanted, right=True)[:, 0]
    return chosen.clamp(max=scores.shape[-1] - 1)


def _with_logprobs(logprobs: Tensor, token_ids: Tensor, tops: Sequence[int]) -> list[Chosen]:
    """logprobs: float32 [B, V]. token_ids: int64 [B]. tops: how many of the likeliest are wanted, one a row."""
    values = logprobs.gather(-1, token_ids[:, None])[:, 0].tolist()
    likeliest: list[tuple[tuple[int, float], ...]] = [()] * len(tops)
    rows = [row for row, wanted in enumerate(tops) if wanted]
    if rows:
        for row, each in zip(rows, _likeliest(logprobs[_indices(rows, logprobs)], max(tops)), strict=True):
            likeliest[row] = each[: tops[row]]
    return list(map(Chosen, token_ids.tolist(), values, likeliest))


def _likeliest(logprobs: Tensor, wanted: int) -> list[tuple[tuple[int, float], ...]]:
    """The likeliest tokens of each row, in order; of equals, which topk takes as they come, the lower id first."""
    wanted = min(wanted, logprobs.shape[-1])
    logprobs = logprobs.nan_to_num(nan=-torch.inf)
    rows, ids = (logprobs >= logprobs.topk(wanted, dim=-1).values[:, -1:]).nonzero(as_tuple=True)
    found = [each.cpu().numpy() for each in (rows, ids, logprobs[rows, ids])]
    rows_of, ids_of, values_of = (each[np.lexsort((found[1], -found[2], found[0]))] for each in found)
    starts = np.searchsorted(rows_of, np.arange(len(logprobs)))
    at = starts[:, None] + np.arange(wanted)  # [B, wanted]
    return [tuple(zip(*each, strict=True)) for each in zip(ids_of[at].tolist(), values_of[at].tolist(), strict=True)]


def _column(values: Sequence[float], like: Tensor, dtype: type[np.floating[Any]] = np.float32) -> Tensor:
    return to_device(np.array(values, dtype), like.device)[:, None]


def _indices(rows: Sequence[int], like: Tensor) -> Tensor:
    """By a list of rows, torch would have the host wait for the device."""
    return to_device(np.array(rows, np.int64), like.device)
