"""Questions whose answers are read as they come, and a load that has one in each stage at once."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial

from client.answer import Delta, Event, Progress
from client.client import FramesieveClient
from client.prompt import Video
from common.errors import FramesieveError
from tests import media
from tests.integration.fleet import Fleet, until

LONG_SLICES = 128
# Within which failures are heard and what leavers held is given up; CI's machines may be busy with others' work.
SOON_S = 3.0 if "CI" in os.environ else 1.0


def long_clip(seed: int) -> Video:
    """Slices that no cache knows: seconds of work for the fleet's tower."""
    return Video(data=media.clip(2 * LONG_SLICES, fps=8, seed=seed), fps=8)


def short_clip(seed: int) -> Video:
    return Video(data=media.clip(16, fps=8, seed=seed), fps=8)


def long_text(seed: int) -> str:
    """That the fleet prefills for a second, and has not seen."""
    return f"Question {seed}: " + "What moves? " * 400


class Asked:
    """One question; leaving cancels it. failed, ended_s: what it failed by, and when it ended by itself."""

    def __init__(self, stream: AsyncIterator[Event]) -> None:
        self.events: list[Event] = []
        self.failed: FramesieveError | None = None
        self.ended_s = 0.0
        self._stream = stream
        self.task = asyncio.create_task(self._read())

    @property
    def tokens(self) -> int:
        return sum(isinstance(event, Delta) for event in self.events)

    @property
    def half_encoded(self) -> bool:
        """Whether slices of its media are encoded, and others are yet to be decoded."""
        last = [event for event in self.events if isinstance(event, Progress)][-1:]
        return any(each.encoded_slices > 0 and each.decoded_slices < LONG_SLICES for each in last)

    async def leave(self) -> None:
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task

    async def _read(self) -> None:
        try:
            async for event in self._stream:
                self.events.append(event)
        except FramesieveError as error:
            self.failed = error
        self.ended_s = time.monotonic()


def endless(client: FramesieveClient, video: Video | None = None) -> Asked:
    """An answer that goes on for longer than any test."""
    return Asked(client.stream(video, "What moves?", max_new_tokens=4000, ignore_eos=True))


def asked_about(client: FramesieveClient, video: Video) -> Asked:
    return Asked(client.stream(video, "What moves?", max_new_tokens=4, ignore_eos=True))


class Load:
    """One request in each stage, once `held` returns; the first of each service of the fleet holds them."""

    def __init__(self, fleet: Fleet, client: FramesieveClient, seed: int) -> None:
        self._fleet = fleet
        self._client = client
        self._seed = seed
        self.asked: dict[str, Asked] = {}

    async def held(self) -> None:
        encoder, generation = self._fleet.encoder[0], self._fleet.generation
        one, other = long_clip(self._seed), long_clip(self._seed + 1)
        self.asked["generating"] = generating = endless(self._client, short_clip(self._seed))
        await until(lambda: generating.tokens > 0)
        self.asked["decoding and encoding"] = encoding = asked_about(self._client, one)
        await until(lambda: encoding.half_encoded)
        self.asked["waiting for room"] = asked_about(self._client, other)
        await until(lambda: encoder.metric("framesieve_encoder_room_waiting") >= 1)
        text = long_text(self._seed)
        self.asked["prefilling"] = prefilling = Asked(self._client.stream(None, text, max_new_tokens=4))
        running = partial(generation.metric, "framesieve_generation_engine_requests", state="running")
        await until(lambda: running() == len((generating, prefilling)))
        assert not generating.failed
        assert encoding.half_encoded
        assert not prefilling.tokens

    async def leave(self) -> None:
        for each in self.asked.values():
            await each.leave()
