"""Logits into answers: tokens are chosen, appended and told, until an end token, a stop string or the limit ends one.

    guesses:            [a  b]
    rows of logits:  [0  1  2]       row 0 chooses a: right, so row 1 counts too; it chooses c: wrong, row 2 is nobody's

It knows neither threads nor commands: while tokens are appended, nobody else may touch requests or the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate

import numpy as np
from torch import Tensor

from services.generation.engine.scheduler import Scheduler
from services.generation.request.batch import Window
from services.generation.request.request import Event, Finished, FinishReason, Request, Status, Tokens
from services.generation.sampling.sampler import Chosen, SamplingState, sample
from services.generation.to_device import to_device


def first_rows(sampled: Sequence[Window]) -> dict[Window, int]:
    """The row of logits that the next token of each follows from; those of its guesses come after it."""
    return dict(zip(sampled, accumulate((1 + window.guesses for window in sampled), initial=0), strict=False))


def choose(rows: Mapping[Window, int], logits: Tensor) -> list[Chosen]:
    """One token a window, by its row of logits [S, vocab_size]. Waits for the device."""
    if len(rows) < len(logits):
        logits = logits[to_device(np.array(list(rows.values())), logits.device)]
    return sample(logits, [_sampling_state(window.request) for window in rows])


class Outputs:
    """send: tells a request's listener. end: frees what a request holds, for its answer has ended."""

    def __init__(
        self, scheduler: Scheduler, send: Callable[[Request, Event], None], end: Callable[[Request], None]
    ) -> None:
        self._scheduler = scheduler
        self._send = send
        self._end = end

    def accept(self, rows: Mapping[Window, int], chosen: Sequence[Chosen], place: int) -> dict[Window, int]:
        """Appends a token to each answer; returns those whose guess at `place` is that token, and their next row."""
        return dict(self._accepted(rows, chosen, place))

    def _accepted(
        self, rows: Mapping[Window, int], chosen: Sequence[Chosen], place: int
    ) -> Iterator[tuple[Window, int]]:
        for (window, row), token in zip(rows.items(), chosen, strict=True):
            request = window.request
            self._append(request, token)
            if request.status is Status.DONE or place == window.guesses:
                continue
            if token.token_id == request.guesses[place]:
                self._scheduler.computed(request, window.end - window.guesses + place + 1)
                yield window, row + 1

    def _append(self, request: Request, chosen: Chosen) -> None:
        """Adds a token to the answer, and ends it where an end token, a stop string or the limit says so."""
        token = chosen.token_id
        request.output_ids.append(token)
        if request.followers:
            self._scheduler.start_followers(request)
        ended = token in request.sampling.eos_ids
        full = len(request.output_ids) >= request.sampling.max_new_tokens
        text, stopped = ("", False) if ended else request.detokeniser.add(token)
        if (ended or full) and not stopped:
            text += request.detokeniser.flush()
        stopped = stopped or ended
        logprobs = () if chosen.logprob is None else (chosen.logprob,)
        self._send(request, Tokens(text, (token,), logprobs, (chosen.top,) if chosen.top else ()))
        if stopped or full:
            self._end(request)
            reason = FinishReason.STOP if stopped else FinishReason.LENGTH
            self._send(request, Finished(reason, len(request.output_ids)))


def _sampling_state(request: Request) -> SamplingState:
    if request.sampling_state is None:
        request.sampling_state = SamplingState(request.sampling, request.rope.ids)
    return request.sampling_state
