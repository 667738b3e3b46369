"""Turns the events of one request, as they arrive, into the text and the tool calls of its answers, and counts them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from gridsieve.common.telemetry.logs import add_request_stats
from gridsieve.services.generation.answers.events import Dated
from gridsieve.services.generation.answers.metrics import (
    ANSWERS,
    GENERATED_TOKENS,
    INTER_TOKEN_SECONDS,
    count_first_token,
)
from gridsieve.services.generation.request.request import (
    Attended,
    Delta,
    Failed,
    Finished,
    FinishReason,
    PrefillStarted,
    Request,
)
from gridsieve.services.generation.sampling.answer_reader import AnswerReader, Part
from gridsieve.services.generation.sampling.detokenizer import Detokenizer, Tokenizer
from gridsieve.services.generation.sampling.tool_calls import CallDelta
from gridsieve.services.generation.stage_clock import Stage, StageClock
from gridsieve.services.generation.upstream.arriving_item import Progress


@dataclass(frozen=True, slots=True)
class Said:
    """The next part of an answer. index: of the answer. thought, calls: what the part adds to thought and tool calls,
    whose text is not in `delta`."""

    index: int
    delta: Delta
    thought: str = ""
    calls: Sequence[CallDelta] = ()


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of an answer. cached_tokens: of its prompt, found in the prefix cache. thought_tokens: of the answer.
    attended: what it attended to, if that was asked for."""

    index: int
    finished: Finished
    cached_tokens: int
    thought_tokens: int
    attended: Attended | None = None


Told: TypeAlias = Progress | Said | Ended


class Answers:
    """The answers of one request.

    answers: their number. It is not read from `question`, whose list of siblings the engine empties when they start.
    readers: of thought and tool calls, one for each answer; none: all of an answer is text.
    """

    def __init__(
        self,
        question: Request,
        answers: int,
        clock: StageClock,
        tokenizer: Tokenizer,
        readers: Sequence[AnswerReader] = (),
    ) -> None:
        self._question = question
        self._readers = dict(enumerate(readers))
        self._clock = clock
        self._unfinished = answers
        stops = bool(question.sampling.stop)
        self._detokenizers = {} if stops else {index: Detokenizer(tokenizer) for index in range(answers)}
        self._last_token_ns: dict[int, int] = {}  # by answer
        self._attended: dict[int, Attended] = {}  # by answer

    @property
    def complete(self) -> bool:
        return not self._unfinished

    def of(self, events: Iterable[Dated]) -> Iterator[Told]:
        """What events tell. Tokens of one answer that arrived together, as its caller reads slowly, are one part.

        Raises the error of Failed, and exceptions.
        """
        deltas: dict[int, list[Delta]] = {}  # by answer, not yet in a response
        for at_ns, index, event in events:
            if isinstance(event, Delta):
                self._count(at_ns, index)
                deltas.setdefault(index, []).append(event)
                continue
            yield from self._said(deltas)
            deltas = {}
            match event:
                case Progress():
                    yield event
                case PrefillStarted():
                    self._clock.finish(Stage.WAIT_FOR_PREFILL, at_ns)
                case Attended():
                    self._attended[index] = event
                case Finished():
                    self._unfinished -= 1
                    reason = event.reason
                    rest = self._detokenizers[index].flush() if self._detokenizers else ""
                    parts = [Part("", rest, [])]
                    if reader := self._readers.get(index):
                        stopped = reason is FinishReason.STOP
                        parts = [reader.read(rest), reader.end(stopped=stopped)]
                        if stopped and reader.has_whole_calls:
                            reason = FinishReason.TOOL_CALLS
                    for part in parts:
                        if any(part):
                            yield Said(index, Delta(part.text, ()), part.thought, part.calls)
                    ANSWERS.labels(reason.value).inc()
                    thought_tokens = reader.thought_tokens if reader else 0
                    finished, cached_tokens = replace(event, reason=reason), self._question.cached_tokens
                    yield Ended(index, finished, cached_tokens, thought_tokens, self._attended.pop(index, None))
                case Failed():
                    raise event.error
                case Exception():
                    raise event
        yield from self._said(deltas)

    def _said(self, deltas: Mapping[int, Sequence[Delta]]) -> Iterator[Said]:
        for index, several in deltas.items():
            joined = Delta.joined(several)
            GENERATED_TOKENS.inc(len(joined.token_ids))
            add_request_stats(completion_tokens=len(joined.token_ids))
            reader = self._readers.get(index)
            # One by one, in which the reader counts the tokens of a thought, or together.
            read = several if reader is not None and reader.may_think else [joined]
            parts = [self._part_of(index, each) for each in read]
            text, thought = "".join(each.text for each in parts), "".join(each.thought for each in parts)
            yield Said(index, replace(joined, text=text), thought, [call for each in parts for call in each.calls])

    def _part_of(self, index: int, delta: Delta) -> Part:
        text = delta.text
        if self._detokenizers:
            text, _ = self._detokenizers[index].decode(delta.token_ids[:-1] if delta.ended else delta.token_ids)
        reader = self._readers.get(index)
        return reader.read(text, len(delta.token_ids)) if reader else Part("", text, [])

    def _count(self, at_ns: int, index: int) -> None:
        if self._clock.token(at_ns):
            cached_tokens = self._question.cached_tokens
            count_first_token(self._clock, cached_tokens)
            add_request_stats(cached_prompt_tokens=cached_tokens, first_token_ms=self._clock.first_token_ns // 10**6)
        if index in self._last_token_ns:
            INTER_TOKEN_SECONDS.observe((at_ns - self._last_token_ns[index]) * 1e-9)
        self._last_token_ns[index] = at_ns
