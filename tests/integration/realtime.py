"""Sessions of /v1/realtime by OpenAI's client, and the events that tests send."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from openai import AsyncOpenAI
from openai.types.realtime import (
    RealtimeServerEvent,
)
from pydantic import TypeAdapter
from websockets.asyncio.client import connect

from tests.integration.gateway import Gateway, data_url
from tests.integration.live import MAX_PIXELS, PICTURES

FRAMES = [data_url("image/png", picture) for picture in PICTURES]
OWN = {"pruning": {"method": "none"}, "max_pixels": MAX_PIXELS, "window_tokens": 512, "answer_tokens": 128}
WATCHING = {"type": "realtime", "temperature": 0, "max_output_tokens": 6, "gridsieve": OWN}
ANSWER_MS = 60_000
DONE = "conversation.item.done"
TOKEN = "a/secret+of0123456789=="
CHECKED = TypeAdapter(RealtimeServerEvent)


class Talk:
    """A session by OpenAI's client, and its events so far. Those with OpenAI's names are of its types."""

    def __init__(self, connection: Any) -> None:
        self.by = connection
        self.seen: list[dict[str, Any]] = []

    async def until(self, kind: str) -> dict[str, Any]:
        """Reads up to the next event of this kind."""
        while True:
            data = await asyncio.wait_for(self.by.recv_bytes(), 60)
            event = json.loads(data)
            assert self.by.parse_event(data).type == event["type"]  # it takes ours, too
            if not event["type"].startswith("gridsieve."):
                CHECKED.validate_python(event)
            self.seen.append(event)
            if event["type"] == kind:
                return event

    async def show(self, first: int, end: int, **part: Any) -> None:
        """Sends frames, a slice at a time, and waits for each."""
        for place in range(first, end):
            await self.send(image(place, time_s=place / 2) | part)
            if place % 2:
                await self.until("gridsieve.slice")

    async def send(self, *parts: dict[str, Any]) -> None:
        await self.by.conversation.item.create(item={"type": "message", "role": "user", "content": list(parts)})

    async def answer(self, **response: Any) -> dict[str, Any]:
        await self.by.response.create(response=response)
        return (await self.until("response.done"))["response"]

    def text(self) -> str:
        return "".join(each["delta"] for each in self.seen if each["type"] == "response.output_text.delta")


def image(place: int, **fields: Any) -> dict[str, Any]:
    return {"type": "input_image", "image_url": FRAMES[place], **fields}


def words(text: str) -> dict[str, Any]:
    return {"type": "input_text", "text": text}


@asynccontextmanager
async def talking(door: Gateway, session: dict[str, Any] | None = WATCHING) -> AsyncIterator[Talk]:
    client = AsyncOpenAI(base_url=f"{door.url}/v1", api_key="unused")
    async with client, client.realtime.connect() as connection:
        talk = Talk(connection)
        await talk.until("session.created")
        if session is not None:
            await connection.session.update(session=session)
            await talk.until("session.updated")
        yield talk


def made(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "conversation.item.create", "item": {"type": "message", "role": "user", "content": list(parts)}}


def updated(**session: Any) -> dict[str, Any]:
    return {"type": "session.update", "session": session}


def asked(**response: Any) -> dict[str, Any]:
    return {"type": "response.create", "response": response}


def opened(door: Gateway, query: str = "", **options: Any) -> Any:
    return connect(f"ws://127.0.0.1:{door.port}/v1/realtime{query}", proxy=None, **options)
