"""How the next token is chosen from logits: penalties, temperature and truncation for a whole batch at once.

It knows neither requests nor the model; the rules and their order are those of transformers' logits processors:
repetition penalty, then, where a token is drawn, temperature, top-k, top-p, min-p.
A token is drawn by inverting the distribution at one number of the request's own generator, so that an answer depends
on its seed and on no neighbour. Sources: CTRL, arXiv 1909.05858, section 4.1 (penalty); nucleus sampling, arXiv
1904.09751 (top-p); arXiv 2407.01082 (min-p).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.plan import Int32Array


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one answer are chosen, with nothing left open.

    max_new_tokens: at least 1.
    temperature: 0 is greedy.
    top_p, top_k, min_p: truncation of what may be drawn; 1, 0 and 0 keep everything.
    repetition_penalty: above 0; 1 penalises nothing. Greedy answers are penalised too.
    stop: the answer ends before the first of these strings.
    logprobs: whether log-probabilities are wanted.
    eos_ids: tokens that end the answer.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    eos_ids: tuple[int, ...] = ()

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1


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
        self._generator = torch.Generator().manual_seed(params.seed)
        self._prompt_ids = np.unique(prompt_ids).astype(np.int64) if params.penalised else None
        self._seen: Tensor | None = None

    def draw(self) -> float:
        """The next number of the answer's own sequence, uniform in [0, 1)."""
        return float(torch.rand((), dtype=torch.float64, generator=self._generator))

    def seen(self, vocabulary: int, device: torch.device) -> Tensor:
        """Which tokens stand in the prompt or the answer: bool [V]. Only for a penalised answer."""
        if self._seen is None:
            assert self._prompt_ids is not None
            self._seen = torch.zeros(vocabulary, dtype=torch.bool, device=device)
            self._seen[torch.from_numpy(self._prompt_ids).to(device)] = True
        return self._seen

    def add(self, token_id: int) -> None:
        """Notes a token of the answer."""
        if self._seen is not None:
            self._seen[token_id] = True


def sample(logits: Tensor, states: Sequence[SamplingState]) -> list[Chosen]:
    """Chooses one token for each row and notes it in the row's state.

    logits: [B, V], any float dtype, one row a state; not changed.
    Returns one a row.
    """
    scores = logits.float()
    penalised = [row for row, state in enumerate(states) if state.params.penalised]
    drawn = [row for row, state in enumerate(states) if not state.params.greedy]
    penalties = _penalise(scores, [states[row] for row in penalised], penalised) if penalised else scores
    chosen = penalties.argmax(dim=-1)
    if drawn:
        chosen[drawn] = _draw(penalties[drawn], [states[row] for row in drawn])
    token_ids: list[int] = chosen.tolist()
    for row in penalised:
        states[row].add(token_ids[row])
    return [Chosen(*each) for each in zip(token_ids, _logprobs(scores, chosen, states), strict=True)]


def truncate(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Scores after temperature, top-k, top-p and min-p, each row by its own parameters; what is cut is −inf.

    scores: float32 [B, V]. Returns float32 [B, V], each row shifted so that its best is 0.
    """

    def column(values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=scores.device)[:, None]

    # The best becomes 0 first: no temperature, however low, divides it to infinity.
    best = scores.amax(dim=-1, keepdim=True)
    coldest = torch.finfo(torch.float32).tiny
    scores = (scores - best) / column([max(each.temperature, coldest) for each in params])
    if any(each.top_k or each.top_p < 1 for each in params):
        ranked, order = scores.sort(dim=-1, descending=True, stable=True)
        vocabulary = scores.shape[-1]
        last = column([min(each.top_k or vocabulary, vocabulary) - 1 for each in params], torch.int64)
        ranked = ranked.masked_fill(ranked < ranked.gather(-1, last), -torch.inf)
        # What lies above a token, itself included, seen from the far end: transformers' own sum, in its own order.
        tail = ranked.softmax(dim=-1).flip(-1).cumsum(dim=-1).flip(-1)
        cut = tail <= column([1 - each.top_p if each.top_p < 1 else -1.0 for each in params])
        cut[:, 0] = False
        ranked = ranked.masked_fill(cut, -torch.inf)
        scores = torch.empty_like(ranked).scatter_(-1, order, ranked)
    if any(each.min_p for each in params):
        odds = scores.softmax(dim=-1)
        floor = column([each.min_p for each in params]) * odds.amax(dim=-1, keepdim=True)
        scores = scores.masked_fill(odds < floor, -torch.inf)
    return scores


def _penalise(scores: Tensor, states: Sequence[SamplingState], rows: Sequence[int]) -> Tensor:
    some = scores[list(rows)]
    penalty = torch.tensor([state.params.repetition_penalty for state in states], device=scores.device)[:, None]
    seen = torch.stack([state.seen(scores.shape[-1], scores.device) for state in states])
    penalised = scores.clone()
    penalised[list(rows)] = torch.where(seen, torch.where(some < 0, some * penalty, some / penalty), some)
    return penalised


def _draw(scores: Tensor, states: Sequence[SamplingState]) -> Tensor:
    """One token a row: the first whose cumulative probability passes the row's number. int64 [B]."""
    odds = truncate(scores, [state.params for state in states]).double().softmax(dim=-1)
    cumulative = odds.cumsum(dim=-1)
    total = cumulative[:, -1:]
    numbers = torch.tensor([state.draw() for state in states], dtype=torch.float64, device=scores.device)[:, None]
    # Below the total even after rounding, so that a token without probability is never reached.
    wanted = torch.minimum(numbers * total, torch.nextafter(total, torch.zeros_like(total)))
    chosen = torch.searchsorted(cumulative, wanted, right=True)[:, 0]
    return chosen.clamp(max=scores.shape[-1] - 1)


def _logprobs(scores: Tensor, chosen: Tensor, states: Sequence[SamplingState]) -> list[float | None]:
    if not any(state.params.logprobs for state in states):
        return [None] * len(states)
    values = scores.log_softmax(dim=-1).gather(-1, chosen[:, None])[:, 0].tolist()
    return [value if state.params.logprobs else None for value, state in zip(values, states, strict=True)]
