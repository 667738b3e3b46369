"""Two hundred questions at once: each is answered, or refused with a hint when to come back; none hangs."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

from client.client import FramesieveClient
from client.launcher import LocalStack
from client.prompt import Video
from common import errors
from tests import media
from tests.integration.conftest import metric, settles

CROWD = 200
PLACES = 48


async def test_two_hundred_at_once_are_answered_or_refused(checkpoint: Path) -> None:
    clips = [media.clip(8, seed=seed) for seed in range(5)]
    flags = {
        "generation": [
            *("--kv-cache-tokens", "1024", "--max-running-requests", "8"),
            *("--max-waiting-requests", str(PLACES - 8)),
        ]
    }
    with LocalStack(checkpoint, flags=flags) as stack:
        async with FramesieveClient(stack.address) as client:

            async def one(number: int) -> str:
                media_of_it = Video(data=clips[number % len(clips)]) if number % 4 else None
                try:
                    answer = await client.ask(
                        media_of_it,
                        f"Question {number}?",
                        pruning_rate=(0.0, 0.5, 0.75)[number % 3],
                        max_new_tokens=1 + number % 9,
                        n=1 + (number % 10 == 0),
                        timeout_s=120,
                    )
                except errors.Overloaded as refused:
                    return "refused" if refused.retry_after_s > 0 else "refused without a hint"
                assert len(answer.choices) == 1 + (number % 10 == 0)
                return "answered"

            outcomes = Counter(await asyncio.gather(*(one(number) for number in range(CROWD))))
            assert outcomes.total() == CROWD
            assert outcomes.keys() <= {"answered", "refused"}
            assert outcomes["answered"] >= PLACES / 2
            again = await client.ask(Video(data=clips[0]), "And now?", max_new_tokens=2, timeout_s=30)
            assert again.usage.completion_tokens >= 1
        for name in ("framesieve_generation_kv_blocks_used", "framesieve_generation_media_buffer_used_bytes"):
            assert await settles(lambda name=name: metric(stack, "generation", name), 0)
        assert await settles(lambda: metric(stack, "encoder", "framesieve_encoder_room_used_bytes"), 0)
