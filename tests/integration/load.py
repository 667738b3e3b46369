"""Questions whose events are collected in the background, and a load that holds one request in each stage at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from functools import partial
from itertools import count
from typing import Self

from common.contract.errors import FramesieveError
from framesieve.client.answer import Delta, Event, Progress
from framesieve.client.client import FramesieveClient
from framesieve.client.prompt import Video
from tests import media
from tests.awake import SOON_S, awake
from tests.integration.fleet import Fleet, stopped_workers, until
from tests.integration.halfway import Halfway, halfway
from tests.preprocessing.media_server import Server, head, serving

LONG_SLICES = 128


def long_clip(seed: int) -> Video:
    """A clip that keeps the tower of the fleet busy for seconds. Another seed is another clip, unknown to caches."""
    return Video(data=media.clip(2 * LONG_SLICES, fps=8, seed=seed), fps=8)


def short_clip(seed: int) -> Video:
    return Video(data=media.clip(16, fps=8, seed=seed), fps=8)


def long_text(seed: int) -> str:
    """A prompt that the fleet prefills for about a second. Another seed shares no prefix with it."""
    return f"Question {seed}: " + "What moves? " * 400


class Asked:
    """One question. failed: its error, if any; ended_s: when it ended by itself (monotonic clock)."""

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
        """Whether some slices of its long clip are encoded and others not yet decoded."""
        last = next((event for event in reversed(self.events) if isinstance(event, Progress)), None)
        return last is not None and last.encoded_slices > 0 and last.decoded_slices < LONG_SLICES

    async def leave(self) -> None:
        """Cancels the call, as a client does that disconnects."""
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
    """A question whose answer takes longer than any test."""
    return Asked(client.stream(video, "What moves?", max_new_tokens=4000, ignore_eos=True))


def asked_about(client: FramesieveClient, video: Video) -> Asked:
    return Asked(client.stream(video, "What moves?", max_new_tokens=4, ignore_eos=True))


def quick(client: FramesieveClient, seed: int, timeout_s: float = 60) -> Asked:
    """A pruned question of two tokens about a short clip."""
    clip = short_clip(seed)
    return Asked(client.stream(clip, "What moves?", pruning_rate=0.5, max_new_tokens=2, timeout_s=timeout_s))


async def is_answered_soon(client: FramesieveClient) -> None:
    """Asks until a question is answered: channels reconnect within a second after a service is back."""
    with awake() as passed_s:
        for attempt in count():
            again = asked_about(client, short_clip(100 + attempt))
            await asyncio.wait_for(again.task, 30)
            if again.failed is None:
                assert again.tokens == 4
                return
            assert passed_s() < SOON_S, again.failed
            await asyncio.sleep(SOON_S / 6)


@asynccontextmanager
async def dripping(port: int) -> AsyncIterator[Server]:
    """Serves a file that never ends, at `dripped(port)`."""

    async def drip(writer: asyncio.StreamWriter) -> None:
        writer.write(head(200, "Content-Length: 1000000"))
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.02)

    async with serving(drip, port=port) as server:
        yield server


def dripped(port: int) -> Video:
    return Video(url=f"http://localhost:{port}/clip.mp4")


async def in_transfer(client: FramesieveClient, replica: Halfway, seed: int) -> Asked:
    """Asks until a question goes through `replica`, which then holds back half of its embeddings; returns that one."""
    for number in count(100 * seed):
        asked = asked_about(client, short_clip(number))
        await until(lambda asked=asked: replica.holds or asked.task.done())  # type: ignore[misc]
        if replica.holds:
            break
        assert asked.failed is None
    return asked


class Load:
    """One request in each stage, once `held` returns, in the first replica of each service of the fleet.

    One request is halfway through its transfer from `halfway`, which listens at the address of the second encoder.
    The processes that read and decode media are stopped until `resume`.
    """

    def __init__(self, fleet: Fleet, client: FramesieveClient, seed: int) -> None:
        self._fleet = fleet
        self._client = client
        self._seed = seed
        self._standing_still = ExitStack()
        self._serving = AsyncExitStack()
        self._replica = AsyncExitStack()
        self.asked: dict[str, Asked] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.leave()
        self.resume()
        await self.lose_replica()
        await self._serving.aclose()

    async def held(self) -> None:
        preprocessing, encoder, generation = self._fleet.first
        one, other = long_clip(self._seed), long_clip(self._seed + 1)
        replica = await self._replica.enter_async_context(halfway(self._fleet.encoder[1].address, encoder.address))
        self.asked["in transfer"] = await in_transfer(self._client, replica, self._seed + 1)
        self.halfway = replica
        self.server = await self._serving.enter_async_context(dripping(self._fleet.fetch_port))
        self.asked["fetching"] = asked_about(self._client, dripped(self._fleet.fetch_port))
        await until(lambda: self.server.requests)
        self.asked["generating"] = generating = endless(self._client, short_clip(self._seed))
        await until(lambda: generating.tokens > 0)
        self.asked["decoding and encoding"] = encoding = asked_about(self._client, one)
        await until(lambda: encoding.half_encoded)
        self.asked["waiting for room"] = asked_about(self._client, other)
        await until(lambda: encoder.metric("framesieve_encoder_buffer_waiting") >= 1)
        self._standing_still.enter_context(stopped_workers(preprocessing))
        self.asked["reading"] = asked_about(self._client, short_clip(self._seed + 1))
        await until(lambda: preprocessing.metric("framesieve_preprocessing_jobs", pool="read") == 1)
        text = long_text(self._seed)
        self.asked["prefilling"] = prefilling = Asked(self._client.stream(None, text, max_new_tokens=4))
        running = partial(generation.metric, "framesieve_generation_engine_requests", state="running")
        await until(lambda: running() == len((generating, prefilling)))
        assert not generating.failed
        assert encoding.half_encoded
        assert not prefilling.tokens

    def resume(self) -> None:
        """Lets the processes that read and decode media continue."""
        self._standing_still.close()

    async def lose_replica(self) -> None:
        """Ends the server that has sent half of an item."""
        await self._replica.aclose()

    async def leave(self) -> None:
        for each in self.asked.values():
            await each.leave()
