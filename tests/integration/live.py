"""Live sessions over gRPC, and the pictures and questions of tests."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from gridsieve.client.answer import Answer
from gridsieve.client.prompt import Frames, Pruning, Video
from gridsieve.common.channels import open_channel
from gridsieve.common.security.credentials import NO_CREDENTIALS
from gridsieve.v1 import prompt_pb2
from gridsieve.v1.generation_pb2 import LiveAsk, LiveFrame, LiveOpen, LiveRequest, LiveResponse, Sampling
from gridsieve.v1.generation_pb2_grpc import GenerationServiceStub
from tests import media
from tests.integration.fleet import Stack

QUESTION, SECOND = "What moves?", "And now?"
WHOLE = prompt_pb2.Pruning(method="none")
MAX_PIXELS = 112 * 112
PICTURES = tuple(media.picture(112, 112, seed) for seed in range(16))
GREEDY: Any = {"max_new_tokens": 6, "temperature": 0, "logprobs": True, "timeout_s": 60}
OWN = Sampling(max_new_tokens=6, temperature=0, logprobs=True)


@dataclass
class Watching:
    """A Live call: what it answered so far."""

    call: Any
    seen: list[LiveResponse] = field(default_factory=list)

    async def send(self, **request: Any) -> None:
        await self.call.write(LiveRequest(**request))

    async def until(self, kind: str) -> Any:
        """Reads up to the next response of this kind."""
        while (response := await self.call.read()) is not grpc.aio.EOF:
            self.seen.append(response)
            if response.HasField(kind):
                return getattr(response, kind)
        raise AssertionError(f"the session ended before {kind}")

    async def show(self, pictures: Sequence[bytes], times_s: Sequence[float]) -> None:
        """Sends frames, a slice at a time, and waits for each."""
        for place, (picture, time_s) in enumerate(zip(pictures, times_s, strict=True)):
            await self.send(frame=LiveFrame(picture=picture, time_s=time_s))
            if place % 2:
                await self.until("slice")

    async def ask(self, text: str, sampling: Sampling = OWN, **ask: Any) -> tuple[list[int], list[float]]:
        """Tokens and log-probabilities of the answer."""
        await self.send(ask=LiveAsk(parts=[prompt_pb2.Part(text=text)], sampling=sampling, **ask))
        first = len(self.seen)
        await self.until("finished")
        deltas = [each.delta.delta for each in self.seen[first:] if each.HasField("delta")]
        return [one for each in deltas for one in each.token_ids], [one for each in deltas for one in each.logprobs]


@asynccontextmanager
async def watching(address: str, **opened: Any) -> AsyncIterator[Watching]:
    own = {"pruning": WHOLE, "max_pixels": MAX_PIXELS, "window_tokens": 512, "answer_tokens": 128}
    async with open_channel(address, NO_CREDENTIALS) as channel:
        live = Watching(GenerationServiceStub(channel).Live())
        await live.send(open=LiveOpen(**{**own, **opened}))
        await live.until("accepted")
        yield live
        live.call.cancel()


def assert_same(asked: tuple[list[int], list[float]], expected: Answer) -> None:
    tokens, logprobs = asked
    assert tokens == list(expected.token_ids)
    assert logprobs == pytest.approx(expected.logprobs, abs=1e-4)


def lines_with(stack: Stack, text: str) -> list[dict[str, Any]]:
    """The lines in the services' logs with a text."""
    lines = [line for name in stack.services for line in stack.log(name).splitlines()]
    return [json.loads(line) for line in lines if text in line]


def video(first: int, end: int, times_s: Sequence[float]) -> Video:
    return Video(
        frames=Frames(PICTURES[first:end], tuple(times_s)), max_pixels=MAX_PIXELS, pruning=Pruning(method="none")
    )
