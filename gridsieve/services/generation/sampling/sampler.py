"""Samples the next token from logits for a whole batch: biases, penalties, grammar, temperature, truncation.

The rules and their order are those of transformers' logits processors: the bias of the request (`bias.py`), on raw
logits as `SequenceBiasLogitsProcessor`; penalties (`penalties.py`); tokens that the answer must not have next
(`banned.py`); the tokens that a grammar allows (`structured.py`); then, unless greedy, temperature, top-k and top-p
(`truncation.py`), and min-p. Truncation keeps or drops tied tokens together. Each rule is computed only for the rows
that use it. A token is drawn by inverting the cumulative distribution at one number of the request's own generator, so
an answer depends on its seed and not on the batch. Log-probabilities are those of raw logits. This module knows neither
requests nor the model.
Sources: nucleus sampling, arXiv 1904.09751 (top-p); arXiv 2407.01082 (min-p).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from gridsieve.common.contract.plan import Int32Array
from gridsieve.services.compute.transfers import ToHost, to_device
from gridsieve.services.generation.sampling.banned import Banned, Spelling
from gridsieve.services.generation.sampling.bias import Bias, add_bias
from gridsieve.services.generation.sampling.penalties import Penalties, penalise
from gridsieve.services.generation.sampling.structured import DocumentState, Grammar, forbid
from gridsieve.services.generation.sampling.truncation import column, floors

# The bias that forbids a token, as OpenAI's API defines it.
_FORBIDS = -100


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one answer is sampled, with all defaults resolved.

    max_new_tokens: at least 1.
    temperature: 0 is greedy.
    top_p, top_k, min_p: truncation; 1, 0 and 0 keep everything.
    repetition_penalty: above 0, 1 is neutral. Applies to greedy answers, too.
    presence_penalty, frequency_penalty: 0 is neutral.
    stop: the answer ends before the first of these strings.
    logprobs: whether to return log-probabilities; top_logprobs: for how many of the most likely tokens besides.
    eos_ids: tokens that end the answer.
    grammar: what the answer must be; None for free text.
    min_new_tokens: the answer does not end by itself before it has this many tokens.
    logit_bias: tokens and what is added to their logits; -100 forbids a token.
    bad_words: sequences of tokens that the answer does not contain.
    attention: whether its rows are computed again once it has ended, to see what they attend to.
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
    grammar: Grammar | None = None
    min_new_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[Spelling, ...] = ()
    attention: bool = False

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalised(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One token of an answer.

    logprob: its natural log-probability by the raw logits; None unless requested.
    top: the most likely tokens and their log-probabilities, in descending order, ties by id; empty unless requested.
    """

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class SamplingState:
    """The state of one answer's sampling: random numbers, tokens that its rules depend on, place in its document.

    Only `accept_token` changes what is sampled next.
    """

    def __init__(self, params: SamplingParams, prompt_ids: Int32Array) -> None:
        """prompt_ids: int32 [N]. Only the set of tokens matters, so the full or the pruned prompt."""
        self.params = params
        self.penalties = (
            Penalties(params.repetition_penalty, params.presence_penalty, params.frequency_penalty, prompt_ids)
            if params.penalised
            else None
        )
        biases = {token_id: value for token_id, value in params.logit_bias if value not in (0, _FORBIDS)}
        self.bias = Bias.of([*biases], [*biases.values()]) if biases else None
        forbidden = [token_id for token_id, value in params.logit_bias if value == _FORBIDS]
        end_ids = params.eos_ids if params.min_new_tokens else ()
        self.banned = (
            Banned(forbidden, params.bad_words, end_ids, params.min_new_tokens)
            if forbidden or params.bad_words or end_ids
            else None
        )
        self.document = DocumentState(params.grammar) if params.grammar else None
        self._generator = torch.Generator().manual_seed(params.seed)
        self._numbers: list[float] = []  # drawn so far, one for each token of the answer; its copies share them
        self._num_tokens = 0
        self._free = all(rule is None for rule in (self.bias, self.penalties, self.banned, self.document))
        self.plain = params.greedy and self._free  # whether the most likely token by the raw logits is chosen

    def copy(self) -> SamplingState:
        """A state of the same answer that draws the same numbers; what is added to either, the other does not know."""
        other = copy(self)
        other.penalties = self.penalties and self.penalties.copy()
        other.banned = copy(self.banned)
        other.document = self.document and self.document.copy()
        return other

    def accept_token(self, token_id: int) -> None:
        """Takes a token of the answer."""
        self._num_tokens += 1
        if self._free:
            return
        if self.penalties:
            self.penalties.count(token_id)
        if self.banned:
            self.banned.accept_token(token_id)
        if self.document:
            self.document.accept_token(token_id)

    def draw(self) -> float:
        """The number of the answer's generator for its next token, uniform in [0, 1)."""
        while len(self._numbers) <= self._num_tokens:
            self._numbers.append(float(torch.rand((), dtype=torch.float64, generator=self._generator)))
        return self._numbers[self._num_tokens]


def sample_and_verify(
    logits: Tensor, states: Sequence[SamplingState], drafts: Sequence[Sequence[int]]
) -> list[list[SampledToken] | Exception]:
    """Samples one token for each sequence, and one more after each draft token that equals the token sampled for it.

        draft tokens:       [a  b]
        rows of logits:  [0  1  2]      row 0 gives a: accepted, row 1 counts; it gives c: rejected, row 2 is unused

    logits: [S, V], for each sequence 1 + len(draft) rows.
    Returns the sampled tokens of each sequence: those equal to draft tokens, and one more; or why its state could not
    take one.

    Exact at any temperature: a draft is one token, so accepting it when it is the one drawn is rejection sampling from
    a distribution that gives it everything. Each token is that which the sequence would have drawn without drafts, too:
    its random numbers are those of its own generator, one for each token of the answer.

    Rows are sampled position by position over all sequences: penalties and random numbers of a row depend on the tokens
    accepted before it. Where nothing depends on them, all rows at once. The states change once all rows are sampled: a
    try that lacked memory leaves them as they were.
    Source: speculative sampling, arXiv 2302.01318.
    """
    if all(state.plain and not state.params.logprobs for state in states):
        best = iter(logits.argmax(dim=-1).tolist())
        return [_accepted([next(best) for _ in range(1 + len(draft))], draft) for draft in drafts]
    first_rows = list(accumulate((1 + len(draft) for draft in drafts), initial=0))
    sampled: list[list[SampledToken]] = [[] for _ in states]
    errors: dict[int, Exception] = {}
    trials, active, position = [state.copy() for state in states], list(range(len(states))), 0
    while active:
        rows = logits
        if len(active) < len(logits):
            rows = logits[_indices([first_rows[index] + position for index in active], logits)]
        choice = choose(rows, [trials[index] for index in active])
        for index, token in zip(active, choice.read(), strict=True):
            sampled[index].append(token)
        errors |= {active[row]: error for row, error in choice.errors.items()}
        active = [
            index
            for index in active
            if position < len(drafts[index])
            and sampled[index][position].token_id == drafts[index][position]
            and index not in errors
        ]
        position += 1
    for index, state in enumerate(states):
        if index not in errors:
            for token in sampled[index]:
                state.accept_token(token.token_id)
    return [errors.get(index, tokens) for index, tokens in enumerate(sampled)]


def _accepted(best: Sequence[int], draft: Sequence[int]) -> list[SampledToken] | Exception:
    """The tokens of a sequence up to the first that is not its draft token. best: one more than the draft."""
    right = next((index for index, token in enumerate(draft) if best[index] != token), len(draft))
    return list(map(SampledToken, best[: right + 1]))


@dataclass(frozen=True, slots=True)
class SampledBatch:
    """One sampled token for each row, which the device may still be computing.

    token_ids: int64 [B], on the device.
    states: by row. num_tops: for each row with log-probabilities, of how many of the most likely tokens besides.
    results: the token ids and, if any row has them, log-probabilities of `num_tops` rows: of their tokens, then ids and
        values of the most likely ones.
    errors: by row, why the state could not take its token; known once the choice is read.
    """

    token_ids: Tensor
    states: Mapping[int, SamplingState]
    num_tops: Mapping[int, int]
    results: ToHost
    errors: dict[int, Exception] = field(default_factory=dict)

    def read(self) -> list[SampledToken]:
        """The tokens, of no meaning in rows without a state.

        Waits for the device, and updates the states; failures are in `errors`.
        """
        token_ids, *logprobs = (each.tolist() for each in self.results.wait())
        sampled = list(map(SampledToken, token_ids))
        for row, state in self.states.items():
            try:
                state.accept_token(token_ids[row])
            except Exception as error:
                self.errors[row] = error
        if logprobs:
            for (row, count), logprob, ids, values in zip(self.num_tops.items(), *logprobs, strict=True):
                top = tuple(zip(ids[:count], values[:count], strict=True))
                sampled[row] = SampledToken(token_ids[row], logprob, top)
        return sampled


def choose(logits: Tensor, states: Sequence[SamplingState | None]) -> SampledBatch:
    """Makes the device sample one token for each row, without waiting for it. A second call does the same again.

    logits: [B, V], any float dtype; not changed.
    states: one for each row, with all tokens before this one; None for a row whose answer has ended meanwhile.
    """
    scores = logits.float()
    by_row = {row: state for row, state in enumerate(states) if state}
    num_tops = {row: state.params.top_logprobs for row, state in by_row.items() if state.params.logprobs}
    if num_tops:
        at_logprobs = _indices([*num_tops], scores)
        logprobs = scores[at_logprobs].log_softmax(dim=-1)
        tops = _most_likely(logprobs, max(num_tops.values()))
    token_ids = scores.argmax(dim=-1)
    ruled = {row: state for row, state in by_row.items() if not state.plain}
    if ruled:
        at = _indices([*ruled], scores)
        token_ids[at] = _by_rules(scores[at], [*ruled.values()])
    results = [token_ids]
    if num_tops:
        results += [logprobs.gather(-1, token_ids[at_logprobs][:, None])[:, 0], *tops]
    return SampledBatch(token_ids, by_row, num_tops, ToHost(results))


def truncate(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Scores after temperature, top-k, top-p and min-p, each row by its own parameters; dropped tokens are −inf.

    scores: float32 [B, V]. Returns float32 [B, V], each row shifted so that its maximum is 0.
    """
    # Shifting the maximum to 0 first keeps it finite at any temperature.
    best = scores.amax(dim=-1, keepdim=True)
    coldest = torch.finfo(torch.float32).tiny
    scores = (scores - best).div_(column([max(each.temperature, coldest) for each in params], scores, np.float32))
    lowest = floors(scores, [each.top_k for each in params], [each.top_p for each in params])
    min_ps = column([math.log(each.min_p) if each.min_p else -math.inf for each in params], scores, np.float32)
    return scores.masked_fill_(scores < lowest.maximum(min_ps), -torch.inf)


def _by_rules(scores: Tensor, states: Sequence[SamplingState]) -> Tensor:
    """One token for each row, by its rules and at random. scores: float32 [B, V], changed. Returns int64 [B]."""
    biases = {row: state.bias for row, state in enumerate(states) if state.bias}
    if biases:
        add_bias(scores, biases)
    penalties = {row: state.penalties for row, state in enumerate(states) if state.penalties}
    if penalties:
        penalise(scores, penalties)
    banned = {row: state.banned.bias() for row, state in enumerate(states) if state.banned}
    if banned:
        add_bias(scores, banned)
    documents = {row: state.document for row, state in enumerate(states) if state.document}
    if documents:
        forbid(scores, documents)
    token_ids = scores.argmax(dim=-1)
    drawn = [row for row, state in enumerate(states) if not state.params.greedy]
    if drawn:
        at = _indices(drawn, scores)
        token_ids[at] = _draw(scores[at], [states[row] for row in drawn])
    return token_ids


def _draw(scores: Tensor, states: Sequence[SamplingState]) -> Tensor:
    """For each row the first token whose cumulative probability exceeds the random number of its state: int64 [B]."""
    odds = truncate(scores, [state.params for state in states]).exp()
    cumulative = odds.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    numbers = column([state.draw() for state in states], scores, np.float64)
    # Strictly below the total even after rounding: a token of probability 0 is never drawn.
    wanted = torch.minimum(numbers * total, torch.nextafter(total, torch.zeros_like(total)))
    chosen = torch.searchsorted(cumulative, wanted, right=True)[:, 0]
    return chosen.clamp(max=scores.shape[-1] - 1)


def _most_likely(logprobs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Ids and values of the `count` most likely tokens of each row in descending order, ties by id: [B, count] each.

    topk leaves the order of ties open, so it ranks integers that hold both.
    """
    if not count:
        return torch.empty_like(logprobs[:, :0], dtype=torch.int64), logprobs[:, :0]
    logprobs = logprobs.nan_to_num(nan=-torch.inf) + 0.0  # which makes −0 to 0
    bits = logprobs.view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()  # as the values are ordered
    size = logprobs.shape[-1]
    keys = (ordered << 32) + torch.arange(size - 1, -1, -1, device=logprobs.device)
    ids = size - 1 - (keys.topk(min(count, size), dim=-1).values & 0xFFFFFFFF)
    return ids, logprobs.gather(-1, ids)


def _indices(rows: Sequence[int], like: Tensor) -> Tensor:
    """Row indices on the device. Indexing by a Python list would make the host wait for the device."""
    return to_device(np.array(rows, np.int64), like.device)
