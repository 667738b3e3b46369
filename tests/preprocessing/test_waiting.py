"""A prompt waits for what its own plan needs: text never waits for media, and gauges say who waits for a thread."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY

from services.preprocessing.prompt.tokens import LARGE_TEXT_CHARS
from tests.preprocessing.preprocessing_media import clip
from tests.preprocessing.service import plan_of, prompt_of, running_queues, serving, settled, stopped, text, video


def planning(what: str, threads: str) -> float:
    value = REGISTRY.get_sample_value(f"framesieve_preprocessing_planning_{what}", {"threads": threads})
    assert value is not None
    return value


async def asking(stub: Any, *parts: Any) -> Any:
    """A call that has asked for a plan."""
    call = stub.Preprocess()
    await call.write(prompt_of(*parts))
    return call


async def test_text_is_planned_while_readers_stand_still_and_other_prompts_wait(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    data = clip(10)
    async with running_queues() as queues, serving(tiny_checkpoint, None, tmp_path, queues, threads=2) as stub:
        with stopped(queues.reading) as pid:
            held = [await asking(stub, video(data), text("?")) for _ in range(2)]
            assert await settled(lambda: queues.reading.jobs == 2)
            assert planning("jobs", "slow") == 2
            assert planning("waiting", "slow") == planning("oldest_seconds", "slow") == 0
            for _ in range(3):
                async with asyncio.timeout(20):
                    assert not (await plan_of(await asking(stub, text("What moves?")))).media
            # These wait, and hold up nobody who does not.
            held += [await asking(stub, video(data)), await asking(stub, text("x" * (LARGE_TEXT_CHARS + 1)))]
            assert await settled(lambda: planning("waiting", "slow") == 2)
            assert planning("jobs", "slow") == 4
            first_s = planning("oldest_seconds", "slow")
            async with asyncio.timeout(20):
                assert await plan_of(await asking(stub, text("x" * 1000)))
            assert planning("oldest_seconds", "slow") > first_s > 0
            assert planning("jobs", "quick") == planning("oldest_seconds", "quick") == 0
            os.kill(pid, signal.SIGCONT)
            async with asyncio.timeout(30):
                assert [len((await plan_of(call)).media) for call in held] == [1, 1, 1, 0]
        assert await settled(lambda: planning("jobs", "slow") == planning("oldest_seconds", "slow") == 0)
        assert queues.replaced == []
