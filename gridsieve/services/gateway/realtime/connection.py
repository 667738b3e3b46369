"""One connection: the client's events become requests of a Live call, and its responses events.

    client ── session.update ─────────▶ open           anew until something was seen or asked, or with a source
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
from typing import TypeAlias

from gridsieve.common.contract.data_urls import parse_data_url
from gridsieve.common.contract.errors import GridsieveError, InvalidRequest, Unavailable, within
from gridsieve.common.security.quotas import Charge
from gridsieve.services.gateway.http.errors import in_words
from gridsieve.services.gateway.models import Named
from gridsieve.services.gateway.realtime.answers import Answers
from gridsieve.services.gateway.realtime.events import Names, ServerEvent, error_event, item_events, session_object
from gridsieve.services.gateway.realtime.live import Live
from gridsieve.services.gateway.realtime.options import ask_message, limit_of, name_of, open_message
from gridsieve.services.gateway.realtime.request import (
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
from gridsieve.v1.generation_pb2 import LiveCancel, LiveFrame, LiveOpen, LiveRequest

Send: TypeAlias = Callable[[ServerEvent], Awaitable[None]]

MAX_KEPT_CHARACTERS = 2**20
"""Of texts that wait for a response."""
MAX_KNOWN_FRAMES = 1024
"""The last ones: of those the session knows where the client sent them."""


class Connection:
    """send: waits while the client does not read. asked_model: the name that the client called its model by."""

    def __init__(
        self,
        names: Names,
        send: Send,
        live: Live,
        model: Named,
        asked_model: str | None,
        request_id: str,
        charge: Charge,
    ) -> None:
        self._names = names
        self._send, self._live, self._request_id, self._charge = send, live, request_id, charge
        self._model, self._models = model, {None, model.name, asked_model}
        self._id, self._answers = self._names.new("sess"), Answers(self._names, self._sender)
        self._fields = SessionFields()
        self._opened: LiveOpen | None = None
        self._group = asyncio.TaskGroup()
        self._watching: asyncio.Task[None] | None = None  # from the first frame or question on, or a source
        self._since = time.monotonic()
        self._shown, self._shown_s = 0, -math.inf  # frames so far, and the time of the last one
        # Of the last frames: the client's event, and the part of its item.
        self._sent: deque[tuple[str | None, int]] = deque(maxlen=MAX_KNOWN_FRAMES)
        self._texts: list[str] = []  # for the next response
        self._kept_characters = 0  # of these texts

    async def run(self, messages: AsyncIterator[bytes]) -> None:
        """Serves the session until the messages end. Raises the GridsieveError with which generation ends it."""
        try:
            await self._tell("session.created")
            async with self._group:
                async for message in messages:
                    await self._take(message)
                if self._watching:
                    self._watching.cancel()
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _tell(self, kind: str) -> None:
        await self._send(self._names.event(kind, session=session_object(self._id, self._model.name, self._fields)))

    async def _send_all(self, events: Iterable[ServerEvent]) -> None:
        for event in events:
            await self._send(event)

    async def _take(self, message: bytes) -> None:
        """Serves one event. An error that is about it is told, and the session goes on."""
        try:
            self._charge(len(message))
        except GridsieveError as error:
            await self._send(error_event(self._names, error, await asyncio.to_thread(event_id_of, message)))
            return
        try:
            event, event_id = await asyncio.to_thread(parse, message)
            try:
                with in_words(name_of):
                    await self._serve(event)
            except GridsieveError as error:
                await self._send(error_event(self._names, error, event_id))
        finally:
            self._charge(-len(message))

    async def _serve(self, event: ClientEvent | InvalidRequest) -> None:
        match event:
            case InvalidRequest():
                raise event
            case SessionUpdate():
                await self._update(event.session)
            case ItemCreate():
                await self._add_item(event)
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
            for name, unset in (("instructions", ""), ("gridsieve", LiveFields())):
                if (getattr(fields, name) or unset) != (getattr(self._fields, name) or unset):
                    text = "must not change after the first frame or response, or once a source is watched"
                    raise InvalidRequest(text, field=f"session.{name}")
        else:
            await self._open(fields)
        self._fields = fields
        await self._tell("session.updated")
        if fields.source:
            await self._begin()

    async def _open(self, fields: SessionFields) -> None:
        """Opens the session in generation, unless it is open with these fields."""
        opened = await asyncio.to_thread(open_message, fields, self._request_id, self._model.adapter)
        if opened != self._opened:
            self._opened = None
            await self._live.open(opened)
            self._opened = opened
        self._answers.opened(fields, opened)

    async def _begin(self) -> None:
        """Before the first frame or question, and after a source was named."""
        if self._watching is None:
            await self._open(self._fields)
            self._watching = self._group.create_task(self._watch())

    async def _add_item(self, event: ItemCreate) -> None:
        item, last = event.item, self._answers.items.last or "root"
        if event.previous_item_id not in (None, last):
            limit = f"unset, or {last}: items are added at the end"
            raise InvalidRequest(field="previous_item_id", limit=limit, value=event.previous_item_id)
        texts = [part.text for part in item.content if isinstance(part, InputText)]
        kept = self._kept_characters + sum(map(len, texts))
        if kept > MAX_KEPT_CHARACTERS:
            limit = f"at most {MAX_KEPT_CHARACTERS} characters of text before a response"
            raise InvalidRequest(field="item.content", limit=limit, value=kept)
        now_s = time.monotonic() - self._since
        frames = await asyncio.to_thread(lambda: list(self._frames(item, now_s)))  # pictures take long
        if frames:
            await self._begin()
        for place, request in frames:
            self._shown, self._shown_s = self._shown + 1, request.frame.time_s
            self._sent.append((event.event_id, place))
            await self._live.send(request)
        self._texts += texts
        self._kept_characters = kept
        item_id = item.id or self._names.new("item")
        await self._send_all(item_events(self._names, item, item_id, self._answers.items.append(item_id)))

    def _frames(self, item: UserMessage, now_s: float) -> Iterator[tuple[int, LiveRequest]]:
        """With the part's place in the item. Raises InvalidRequest for what is no data: URL, for a time before that of
        the last frame, and for any frame of a session that has a source."""
        shown_s = self._shown_s
        for place, part in enumerate(item.content):
            if not isinstance(part, InputImage):
                continue
            if self._fields.source:
                text = "must not be sent: this session's frames come by its source"
                raise InvalidRequest(text, field=f"item.content[{place}]")
            with within(f"item.content[{place}].image_url"):
                picture = parse_data_url(part.image_url).data
            time_s = max(now_s, shown_s) if part.time_s is None else part.time_s
            if not (math.isfinite(time_s) and time_s >= shown_s):
                limit = "finite" if math.isinf(shown_s) else f"finite, and at least {shown_s:g}, of the frame before it"
                raise InvalidRequest(field=f"item.content[{place}].time_s", limit=limit, value=time_s)
            shown_s = time_s
            yield place, LiveRequest(frame=LiveFrame(picture=picture, time_s=time_s))

    def _sender(self, number: int) -> tuple[str | None, int] | None:
        place = number - (self._shown - len(self._sent))
        return self._sent[place] if 0 <= place < len(self._sent) else None

    async def _ask(self, fields: ResponseFields, event_id: str | None) -> None:
        texts = self._texts + ([fields.instructions] if fields.instructions else [])
        if not texts:
            limit = "set, where no item with input_text came before"
            raise InvalidRequest(field="response.instructions", limit=limit)
        answer = self._answers.new(fields, limit_of(fields, self._fields), event_id)
        asked = await asyncio.to_thread(ask_message, answer.id, texts, fields, self._fields)
        await self._begin()
        self._texts, self._kept_characters = [], 0
        await self._send(self._answers.begin(answer.id, answer))
        await self._live.send(LiveRequest(ask=asked))

    async def _cancel(self, response_id: str | None) -> None:
        waiting = self._answers.waiting
        if not waiting or response_id not in (None, *waiting):
            raise InvalidRequest("there is no such response in progress", field="response_id", value=response_id)
        await self._live.send(LiveRequest(cancel=LiveCancel()))

    async def _watch(self) -> None:
        with in_words(name_of):
            async for response in self._live.responses():
                await self._send_all(self._answers.events(response))
        raise Unavailable("generation ended the session", "generation")
