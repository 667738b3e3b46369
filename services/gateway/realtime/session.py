"""One session: the client's events become requests of a Live call, and its responses events.

    client ── session.update ─────────▶ open           anew until something was seen or asked
           ── conversation.item.create ▶ frame          texts are kept for the next response
           ── response.create ────────▶ ask
           ◀───────── events ────────── slice, delta, finished, …

It knows neither HTTP nor the WebSocket.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from functools import partial
from typing import TypeAlias

from framesieve.common.contract.data_urls import parse_data_url
from framesieve.common.contract.errors import FramesieveError, InvalidRequest, Unavailable, within
from framesieve.common.security.quotas import Charge
from framesieve.common.telemetry.logs import add_request_stats
from framesieve.services.gateway.http.errors import in_words
from framesieve.services.gateway.models import Named
from framesieve.services.gateway.realtime.events import (
    Answer,
    Conversation,
    Names,
    ServerEvent,
    error_event,
    item_events,
    own_event,
    session_object,
)
from framesieve.services.gateway.realtime.live import Live
from framesieve.services.gateway.realtime.options import ask_message, limit_of, name_of, open_message, trigger_id
from framesieve.services.gateway.realtime.request import (
    ClientEvent,
    InputImage,
    InputText,
    ItemCreate,
    LiveFields,
    ResponseCancel,
    ResponseCreate,
    ResponseFields,
    SessionFields,
    SessionUpdate,
    UserMessage,
    event_id_of,
    parse,
)
from framesieve.v1.generation_pb2 import (
    DROP_REASON_REFUSED,
    FINISH_REASON_REFUSED,
    LiveDropped,
    LiveFinished,
    LiveFrame,
    LiveOpen,
)

Send: TypeAlias = Callable[[ServerEvent], Awaitable[None]]

MAX_KEPT_CHARACTERS = 2**20
"""Of texts that wait for a response."""
MAX_KNOWN_FRAMES = 1024
"""The last ones: of those the session knows where the client sent them."""


class Session:
    """send: waits while the client does not read. asked_model: the name that the client called its model by."""

    def __init__(
        self, send: Send, live: Live, model: Named, asked_model: str | None, request_id: str, charge: Charge
    ) -> None:
        self.names = Names()
        self._send, self._live, self._request_id, self._charge = send, live, request_id, charge
        self._model, self._models = model, {None, model.name, asked_model}
        self._id, self._conversation = self.names.new("sess"), Conversation(self.names.new("conv"))
        self._fields = SessionFields()
        self._opened: LiveOpen | None = None
        self._group = asyncio.TaskGroup()
        self._watching: asyncio.Task[None] | None = None  # from the first frame or question on
        self._since = time.monotonic()
        self._shown, self._shown_s = 0, -math.inf  # frames so far, and the time of the last one
        # Of the last frames: the client's event, and the part of its item.
        self._sent: deque[tuple[str | None, int]] = deque(maxlen=MAX_KNOWN_FRAMES)
        self._texts: list[str] = []  # for the next response
        self._kept_characters = 0  # of these texts
        self._answers: dict[str, Answer] = {}  # that are not finished, by the id that generation knows

    async def run(self, messages: AsyncIterator[str]) -> None:
        """Serves the session until the messages end. Raises the FramesieveError with which generation ends it."""
        try:
            await self._tell("session.created")
            async with self._group:
                async for message in messages:
                    await self._take(message)
                if self._watching:
                    self._watching.cancel()
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            self._live.cancel()

    async def _tell(self, kind: str) -> None:
        await self._send(self.names.event(kind, session=session_object(self._id, self._model.name, self._fields)))

    async def _send_all(self, events: Iterable[ServerEvent]) -> None:
        for event in events:
            await self._send(event)

    # --- the client's events -------------------------------------------------------------------------------------

    async def _take(self, message: str) -> None:
        """Serves one event. An error that is about it is told, and the session goes on."""
        charged = len(message)
        try:
            self._charge(charged)
        except FramesieveError as error:
            await self._send(error_event(self.names, error, await asyncio.to_thread(event_id_of, message)))
            return
        try:
            event, event_id = await asyncio.to_thread(parse, message)
            try:
                with in_words(name_of):
                    await self._serve(event)
            except FramesieveError as error:
                await self._send(error_event(self.names, error, event_id))
        finally:
            self._charge(-charged)

    async def _serve(self, event: ClientEvent | InvalidRequest) -> None:
        match event:
            case InvalidRequest():
                raise event
            case SessionUpdate():
                await self._update(event.session)
            case ItemCreate():
                await self._add(event)
            case ResponseCreate():
                await self._ask(event.response or ResponseFields(), event.event_id)
            case ResponseCancel():
                await self._cancel(event.response_id)

    async def _update(self, given: SessionFields) -> None:
        if given.model not in self._models:
            text = f"must stay {self._model.name}: another one needs a connection of its own"
            raise InvalidRequest(text, field="session.model")
        fields = self._fields.updated(given)
        if self._watching:
            for name, unset in (("instructions", ""), ("framesieve", LiveFields())):
                if (getattr(fields, name) or unset) != (getattr(self._fields, name) or unset):
                    raise InvalidRequest("must not change after the first frame or response", field=f"session.{name}")
        elif (opened := open_message(fields, self._request_id, self._model.adapter)) != self._opened:
            await self._open(opened)
        self._fields = fields
        await self._tell("session.updated")

    async def _open(self, opened: LiveOpen) -> None:
        self._opened = None
        await self._live.open(opened)
        self._opened = opened

    async def _begin(self) -> None:
        """Before the first frame or question."""
        if self._opened is None:
            await self._open(open_message(self._fields, self._request_id, self._model.adapter))
        if self._watching is None:
            self._watching = self._group.create_task(self._watch())

    async def _add(self, event: ItemCreate) -> None:
        item, last = event.item, self._conversation.last or "root"
        if event.previous_item_id not in (None, last):
            limit = f"unset, or {last}: items are added at the end"
            raise InvalidRequest(field="previous_item_id", limit=limit, value=event.previous_item_id)
        frames = list(self._frames(item))
        texts = [part.text for part in item.content if isinstance(part, InputText)]
        kept = self._kept_characters + sum(map(len, texts))
        if kept > MAX_KEPT_CHARACTERS:
            limit = f"at most {MAX_KEPT_CHARACTERS} characters of text before a response"
            raise InvalidRequest(field="item.content", limit=limit, value=kept)
        if frames:
            await self._begin()
        for place, frame in frames:
            self._shown, self._shown_s = self._shown + 1, frame.time_s
            self._sent.append((event.event_id, place))
            await self._live.send(frame=frame)
        self._texts += texts
        self._kept_characters = kept
        item_id = item.id or self.names.new("item")
        await self._send_all(item_events(self.names, item, item_id, self._conversation.add(item_id)))

    def _frames(self, item: UserMessage) -> Iterator[tuple[int, LiveFrame]]:
        """With the part's place in the item. Raises InvalidRequest for what is no data: URL, and for a time before that
        of the last frame."""
        now_s, shown_s = time.monotonic() - self._since, self._shown_s
        for place, part in enumerate(item.content):
            if not isinstance(part, InputImage):
                continue
            with within(f"item.content[{place}].image_url"):
                picture = parse_data_url(part.image_url).data
            time_s = max(now_s, shown_s) if part.time_s is None else part.time_s
            if not (math.isfinite(time_s) and time_s >= shown_s):
                limit = "finite" if math.isinf(shown_s) else f"finite, and at least {shown_s:g}, of the frame before it"
                raise InvalidRequest(field=f"item.content[{place}].time_s", limit=limit, value=time_s)
            shown_s = time_s
            yield place, LiveFrame(picture=picture, time_s=time_s)

    async def _ask(self, fields: ResponseFields, event_id: str | None) -> None:
        texts = self._texts + ([fields.instructions] if fields.instructions else [])
        if not texts:
            limit = "set, where no item with input_text came before"
            raise InvalidRequest(field="response.instructions", limit=limit)
        answer = self._answer(fields, limit_of(fields, self._fields), event_id)
        asked = ask_message(answer.id, texts, fields, self._fields)
        await self._begin()
        self._texts, self._kept_characters = [], 0
        self._answers[answer.id] = answer
        await self._send(answer.created())
        await self._live.send(ask=asked)

    async def _cancel(self, response_id: str | None) -> None:
        waiting = [answer.id for answer in self._answers.values()]
        if not waiting or response_id not in (None, *waiting):
            raise InvalidRequest("there is no such response in progress", field="response_id", value=response_id)
        await self._live.send(cancel={})

    # --- generation's responses ----------------------------------------------------------------------------------

    async def _watch(self) -> None:
        async for response in self._live.responses():
            match response.WhichOneof("response"):
                case "delta":
                    answer = await self._answer_of(response.delta.ask_id)
                    await self._send_all(answer.delta(response.delta.delta.text))
                case "finished":
                    await self._finish(response.finished)
                case _:
                    add_request_stats(prompt_tokens=sum(response.slice.kept.shape))  # [K]; of others: none
                    if response.dropped.reason == DROP_REASON_REFUSED:
                        await self._send(self._refused(response.dropped))
                    if event := own_event(self.names, response):
                        await self._send(event)
        raise Unavailable("generation ended the session", "generation")

    async def _finish(self, finished: LiveFinished) -> None:
        answer = await self._answer_of(finished.ask_id)
        del self._answers[finished.ask_id]
        usage = finished.finished.usage
        asked = usage.prompt_tokens - usage.cached_prompt_tokens  # without what the session held before it
        add_request_stats(prompt_tokens=asked, completion_tokens=usage.completion_tokens)
        if error := _error_of(finished):
            await self._send(error_event(self.names, error, answer.event_id))
        await self._send_all(answer.finished(finished, error))

    def _refused(self, dropped: LiveDropped) -> ServerEvent:
        """The error about a frame that was refused."""
        place, event_id, part = dropped.frame - (self._shown - len(self._sent)), None, None
        if dropped.HasField("frame") and 0 <= place < len(self._sent):
            event_id, part = self._sent[place]
        error = _refusal(dropped.error, dropped.error_field, partial(name_of, part=part))
        return error_event(self.names, error, event_id)

    async def _answer_of(self, ask_id: str) -> Answer:
        """The answer that is being told, or one that a trigger asked for."""
        if ask_id not in self._answers:
            triggers = (self._fields.framesieve and self._fields.framesieve.triggers) or ()
            [(index, trigger)] = [each for each in enumerate(triggers) if trigger_id(each[0]) == ask_id]
            assert self._opened is not None
            limit = self._opened.triggers[index].ask.sampling.max_new_tokens or None  # which it keeps
            self._answers[ask_id] = answer = self._answer(trigger.response, limit, None)
            await self._send(answer.created())
        return self._answers[ask_id]

    def _answer(self, fields: ResponseFields, limit: int | None, event_id: str | None) -> Answer:
        return Answer(self.names, fields, limit, self._conversation, event_id)


def _error_of(finished: LiveFinished) -> FramesieveError | None:
    """Why a question has no answer; None: it has one."""
    if not finished.error:
        return None
    if finished.finished.reason != FINISH_REASON_REFUSED:
        return Unavailable(finished.error, "generation")
    return _refusal(finished.error, finished.error_field, name_of)


def _refusal(error: str, field: str, name: Callable[[str], str]) -> InvalidRequest:
    """The error that generation told. field: what it is about, in gRPC's name; empty: nothing."""
    if not field:
        return InvalidRequest(error)
    return InvalidRequest(error.removeprefix(f"{field} "), field=name(field))
