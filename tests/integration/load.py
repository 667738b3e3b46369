"""Questions whose events are collected in the background, and a load that holds one request in each stage at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

from gridsieve.client.answer import Delta, Event, Progress
from gridsieve.client.client import GridsieveClient
from gridsieve.client.prompt import Video
from gridsieve.common.contract.errors import GridsieveError
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
    """A prompt that the fleet prefills for seconds. Another seed shares no prefix with it."""
    return f"Question {seed}: " + "What moves? " * 1200


class Asked:
    """One question. failed: its error, if any; ended_s: when it ended by itself (monotonic clock)."""

    def __init__(self, stream: AsyncIterator[Event]) -> None:
        self.events: list[Event] = []
        self.failed: GridsieveError | None = None
        self.ended_s = 0.0
        self._stream = stream
        self.task = asyncio.create_task(self._read())

    @property
    def tokens(self) -> int:
        return sum(len(event.token_ids) for event in self.events if isinstance(event, Delta))

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
        except GridsieveError as error:
            self.failed = error
        self.ended_s = time.monotonic()


def endless(client: GridsieveClient, video: Video | None = None) -> Asked:
    """A question whose answer takes longer than what any test does from its first token on."""
    return Asked(client.stream(video, "What moves?", max_new_tokens=8000, ignore_eos=True))


def asked_about(client: GridsieveClient, video: Video) -> Asked:
    return Asked(client.stream(video, "What moves?", max_new_tokens=4, ignore_eos=True))


def quick(client: GridsieveClient, seed: int, timeout_s: float = 60) -> Asked:
    """A pruned question of two tokens about a short clip."""
    clip = short_clip(seed)
    return Asked(client.stream(clip, "What moves?", pruning_rate=0.5, max_new_tokens=2, timeout_s=timeout_s))


async def is_answered_soon(client: GridsieveClient) -> None:
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


async def held_by(holds: Callable[[], object], client: GridsieveClient, first_seed: int) -> Asked:
    """Asks until a replica holds the question: replicas are asked by turns."""
    for seed in count(first_seed):
        asked = quick(client, seed)
        await until(lambda asked=asked: holds() or asked.task.done())  # type: ignore[misc]
        if not asked.task.done():
            break
        assert asked.failed is None
    return asked


async def drip(writer: asyncio.StreamWriter) -> None:
    """Serves a file that never ends."""
    writer.write(head(200, "Content-Length: 1000000"))
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.02)


@dataclass
class Load:
    """One request in each stage.

    server: the one that media is fetched from. halfway: the encoder that has sent half of an item; `lose_replica` ends
    it. `resume` lets the processes that read and decode media continue.
    """

    asked: dict[str, Asked]
    server: Server
    halfway: Halfway
    lose_replica: Callable[[], Awaitable[None]]
    resume: Callable[[], None]

    async def leave(self) -> None:
        for each in self.asked.values():
            await each.leave()


@asynccontextmanager
async def one_in_each_stage(fleet: Fleet, client: GridsieveClient, seed: int) -> AsyncIterator[Load]:
    """Holds requests in the first replica of each service. `halfway` listens at the address of the second encoder.

    Workers stand still as soon as half of the first long clip is encoded: on a busy machine they may wait seconds for a
    core, and a stage that needs them could be reached only after others have ended. So what comes then needs none.
    """
    preprocessing, encoder, generation = fleet.first
    known, long, second_long = short_clip(seed), long_clip(seed), long_clip(seed + 1)
    async with serving(drip, port=fleet.fetch_port) as server, AsyncExitStack() as replica:
        slow = await replica.enter_async_context(halfway(fleet.encoder[1].address, encoder.address))
        with ExitStack() as standing_still:
            asked: dict[str, Asked] = {}
            load = Load(asked, server, slow, replica.aclose, standing_still.close)
            try:
                asked["in transfer"] = await held_by(lambda: slow.holds, client, 100 * (seed + 1))
                asked["fetching"] = asked_about(client, Video(url=f"http://localhost:{fleet.fetch_port}/clip.mp4"))
                await until(lambda: server.requests)
                # Preprocessing has their indexes afterwards, and generation all that the known clip becomes.
                for clip in (known, replace(second_long, end_s=1.0)):
                    await asyncio.wait_for(asked_about(client, clip).task, 60)
                asked["decoding and encoding"] = encoding = asked_about(client, long)
                await until(lambda: encoding.half_encoded)
                standing_still.enter_context(stopped_workers(preprocessing))
                asked["waiting for room"] = asked_about(client, second_long)
                await until(lambda: encoder.metric("gridsieve_encoder_buffer_waiting") >= 1)
                asked["generating"] = generating = endless(client, known)
                await until(lambda: generating.tokens > 0)
                asked["reading"] = asked_about(client, short_clip(seed + 1))
                await until(lambda: preprocessing.metric("gridsieve_preprocessing_jobs", pool="read") == 1)
                asked["prefilling"] = Asked(client.stream(None, long_text(seed), max_new_tokens=4))
                running = partial(generation.metric, "gridsieve_generation_engine_requests", state="running")
                await until(lambda: running() == len(("generating", "prefilling")))
                assert not [stage for stage, each in asked.items() if each.task.done()]
                assert encoding.half_encoded
                assert not asked["prefilling"].tokens
                yield load
            finally:
                await load.leave()
