"""Generation's responses as events of the server, and the answers of a session that are not finished.

It knows neither HTTP nor the WebSocket nor the call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from gridsieve.client.events import error_of, refusal_of
from gridsieve.common.telemetry.logs import add_request_stats
from gridsieve.services.gateway.realtime.events import Answer, ItemChain, Names, ServerEvent, error_event, own_event
from gridsieve.services.gateway.realtime.options import name_of
from gridsieve.services.gateway.realtime.request import LiveFields, ResponseFields, SessionFields
from gridsieve.v1.generation_pb2 import DROP_REASON_REFUSED, LiveDropped, LiveFinished, LiveOpen, LiveResponse


class Answers:
    """sent: the client's event that had a frame, by the frame's number, and the part of its item; None: unknown."""

    def __init__(self, names: Names, sent: Callable[[int], tuple[str | None, int] | None] = lambda _: None) -> None:
        self.items = ItemChain(names.new("conv"))
        self._names, self._sent = names, sent
        self._triggers: dict[str, tuple[ResponseFields, int | None]] = {}  # with the limit of the answer's tokens
        self._running: dict[str, Answer] = {}  # by the id that generation knows

    @property
    def waiting(self) -> list[str]:
        """The ids of the answers that are not finished, as the client knows them."""
        return [answer.id for answer in self._running.values()]

    def opened(self, fields: SessionFields, opened: LiveOpen) -> None:
        """What follows is told by a session that was opened so. Its triggers keep what it was opened with."""
        triggers = zip((fields.gridsieve or LiveFields()).triggers or (), opened.triggers, strict=True)
        self._triggers = {
            message.ask.ask_id: (given.response, message.ask.sampling.max_new_tokens or None)
            for given, message in triggers
        }

    def new(self, fields: ResponseFields, limit: int | None, event_id: str | None) -> Answer:
        """An answer before its first event, which `begin` makes. Takes the arguments of Answer."""
        return Answer(self._names, fields, limit, self.items, event_id)

    def begin(self, ask_id: str, answer: Answer) -> ServerEvent:
        """What is told first of an answer. ask_id: of its question, for generation."""
        self._running[ask_id] = answer
        return answer.created()

    def events(self, response: LiveResponse) -> Iterator[ServerEvent]:
        match response.WhichOneof("response"):
            case "delta":
                yield from self._begin_trigger(response.delta.ask_id)
                told = response.delta.delta
                yield from self._running[response.delta.ask_id].delta(told.thought, told.text)
            case "finished":
                yield from self._begin_trigger(response.finished.ask_id)
                yield from self._finish(response.finished)
            case _:
                add_request_stats(prompt_tokens=sum(response.slice.kept.shape))  # [K]; of others: none
                if response.dropped.reason == DROP_REASON_REFUSED:
                    yield self._refused(response.dropped)
                if event := own_event(self._names, response):
                    yield event

    def _begin_trigger(self, ask_id: str) -> Iterator[ServerEvent]:
        """An answer that a trigger asked for begins with its first response."""
        if ask_id not in self._running:
            fields, limit = self._triggers[ask_id]
            yield self.begin(ask_id, self.new(fields, limit, None))

    def _finish(self, finished: LiveFinished) -> Iterator[ServerEvent]:
        answer, usage = self._running.pop(finished.ask_id), finished.finished.usage
        asked = usage.prompt_tokens - usage.cached_prompt_tokens  # without what the session held before it
        add_request_stats(prompt_tokens=asked, completion_tokens=usage.completion_tokens)
        error = error_of(finished) if finished.error else None
        if error:
            error.rename(name_of, {})
            yield error_event(self._names, error, answer.event_id)
        yield from answer.finished(finished, error)

    def _refused(self, dropped: LiveDropped) -> ServerEvent:
        """The error about a frame that was refused."""
        event_id, part = (dropped.HasField("frame") and self._sent(dropped.frame)) or (None, None)
        error = refusal_of(dropped)
        error.rename(partial(name_of, part=part), {})
        return error_event(self._names, error, event_id)
