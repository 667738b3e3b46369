"""Turns the events of one request, as they arrive, into the responses of its stream, and counts them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from gridsieve.common.telemetry.logs import add_request_stats
from gridsieve.services.generation.answers.events import Dated
from gridsieve.services.generation.answers.messages import delta_response, finished_response, progress_response
from gridsieve.services.generation.answers.metrics import (
    GENERATED_TOKENS,
    count_answer,
    count_first_token,
    count_next_token,
)
from gridsieve.services.generation.request.request import (
    Delta,
    Failed,
    Finished,
    FinishReason,
    PrefillStarted,
    Request,
)
from gridsieve.services.generation.sampling.detokenizer import Detokenizer, Tokenizer
from gridsieve.services.generation.sampling.tool_calls import CallDelta, CallReader
from gridsieve.services.generation.stage_clock import Stage, StageClock
from gridsieve.services.generation.upstream.arriving_item import Progress
from gridsieve.v1 import generation_pb2
from gridsieve.v1.generation_pb2 import GenerateResponse


class Responses:
    """The responses of one request.

    answers: their number. It is not read from `question`, whose list of siblings the engine empties when they start.
    readers: for each answer, of its tool calls; empty if answers cannot call tools.
    """

    def __init__(
        self,
        question: Request,
        answers: int,
        usage: generation_pb2.Usage,
        clock: StageClock,
        tokenizer: Tokenizer,
        readers: Mapping[int, CallReader],
    ) -> None:
        self._question = question
        self._tokenizer = tokenizer
        self._readers = readers
        self._usage = usage
        self._clock = clock
        self._unfinished = answers
        stops = bool(question.sampling.stop)
        self._detokenizers = {} if stops else {index: Detokenizer(tokenizer) for index in range(answers)}
        self._last_token_ns: dict[int, int] = {}  # by answer

    @property
    def complete(self) -> bool:
        return not self._unfinished

    def of(self, events: Iterable[Dated]) -> Iterator[GenerateResponse]:
        """The responses to events. Tokens of one answer that arrived together, as its caller reads slowly, become one.

        Raises the error of Failed, and exceptions.
        """
        deltas: dict[int, list[Delta]] = {}  # by answer, not yet in a response
        for at_ns, index, event in events:
            if isinstance(event, Delta):
                self._count(at_ns, index)
                deltas.setdefault(index, []).append(event)
                continue
            yield from self._delta_responses(deltas)
            deltas = {}
            match event:
                case Progress():
                    yield progress_response(event)
                case PrefillStarted():
                    self._clock.finish(Stage.WAIT_FOR_PREFILL, at_ns)
                case Finished():
                    self._unfinished -= 1
                    reason = event.reason
                    rest = self._detokenizers[index].flush() if self._detokenizers else ""
                    pieces = [(rest, list[CallDelta]())]
                    if reader := self._readers.get(index):
                        pieces = [reader.add(rest), reader.end()]
                        if reader.calls and reason is FinishReason.STOP:
                            reason = FinishReason.TOOL_CALLS
                    for text, calls in pieces:
                        if text or calls:
                            yield delta_response(Delta(text, ()), index, self._tokenizer, calls)
                    count_answer(reason)
                    self._usage.completion_tokens = event.completion_tokens
                    self._usage.draft_tokens = event.draft_tokens
                    self._usage.accepted_draft_tokens = event.accepted_draft_tokens
                    self._usage.cached_prompt_tokens = self._question.cached_tokens
                    yield finished_response(reason, self._usage, self._clock, index)
                case Failed():
                    raise event.error
                case Exception():
                    raise event
        yield from self._delta_responses(deltas)

    def _delta_responses(self, deltas: Mapping[int, Sequence[Delta]]) -> Iterator[GenerateResponse]:
        for index, several in deltas.items():
            joined, calls = Delta.joined(several), list[CallDelta]()
            GENERATED_TOKENS.inc(len(joined.token_ids))
            add_request_stats(completion_tokens=len(joined.token_ids))
            if self._detokenizers:
                shown = joined.token_ids[:-1] if joined.ended else joined.token_ids
                joined = replace(joined, text=self._detokenizers[index].add(shown)[0])
            if reader := self._readers.get(index):
                text, calls = reader.add(joined.text)
                joined = replace(joined, text=text)
            yield delta_response(joined, index, self._tokenizer, calls)

    def _count(self, at_ns: int, index: int) -> None:
        if self._clock.token(at_ns):
            cached_tokens = self._question.cached_tokens
            count_first_token(self._clock, cached_tokens)
            add_request_stats(cached_prompt_tokens=cached_tokens, first_token_ms=self._clock.first_token_ns // 10**6)
        if index in self._last_token_ns:
            count_next_token(at_ns - self._last_token_ns[index])
        self._last_token_ns[index] = at_ns
