"""Three replicas of each service: a clip's second question finds the replicas that answered its first one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from gridsieve.client.client import GridsieveClient
from gridsieve.client.prompt import Options, Video
from tests import media
from tests.integration.fleet import Service, started

CLIPS = 48
RATE, ANOTHER_RATE = 0.5, 0.75


@contextmanager
def running(services: Sequence[Service]) -> Iterator[str]:
    """Inside, the services run at the address."""
    with started(*services):
        yield ",".join(each.address for each in services)


async def hits(address: str, encoders: Sequence[Service]) -> tuple[float, float]:
    """The share of second questions that find their clip in generation's prefix cache, and in the encoder's cache.

    A second question with another rate needs the encoder.
    """
    clips = [Video(data=media.clip(16, seed=number)) for number in range(CLIPS)]

    def lookups(outcome: str) -> float:
        return sum(each.metric("gridsieve_encoder_cache_lookups_total", outcome=outcome) for each in encoders)

    async with GridsieveClient(address) as client:

        async def ask(clip: Video, question: str, rate: float) -> bool:
            """Whether most of its prompt was cached."""
            pruned: Options = {"pruning_rate": rate, "pruning_method": "evs"}  # one encoding serves every rate
            usage = (await client.ask(clip, question, **pruned, max_new_tokens=1, timeout_s=60)).usage
            return usage.cached_prompt_tokens > usage.prompt_tokens / 2

        for clip in clips:
            await ask(clip, "What moves?", RATE)
        random.Random(0).shuffle(clips)
        found = [await ask(clip, "Where does it go?", RATE) for clip in clips]
        before = await asyncio.to_thread(lookups, "hit")
        for clip in clips:
            await ask(clip, "What moves?", ANOTHER_RATE)
        return sum(found) / CLIPS, (await asyncio.to_thread(lookups, "hit") - before) / CLIPS


@pytest.mark.deep
async def test_second_questions_find_the_caches_that_know_their_clip(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """In turn, half of them would."""

    def three(name: str, *flags: str) -> list[Service]:
        return [Service(name, tiny_checkpoint, tmp_path, flags) for _ in range(3)]

    with running(three("preprocessing", "--decode-workers", "1")) as preprocessing:
        upstream = ("--preprocessing", preprocessing, "--threads", "1")
        with running(encoders := three("encoder", *upstream)) as encoder:
            upstream = (*upstream, "--encoder", encoder, "--kv-cache-tokens", "32768")
            with running(three("generation", *upstream)) as generation:
                assert min(await hits(generation, encoders)) >= 0.9
