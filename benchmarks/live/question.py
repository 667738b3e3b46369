"""Time to first token of a question about the last minute: in a live session, which has seen it, and asked of
`Generate` with the same frames and the same pruning.

Contenders have services of their own, so that nothing that the session brought into a cache helps the other one.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.ask import ask
from benchmarks.live.camera import FPS, pictures
from benchmarks.live.session import QUESTION, Session
from benchmarks.models import SMALL
from benchmarks.table import Row, Timings
from gridsieve.cli.launcher import LocalStack
from gridsieve.client.client import GridsieveClient
from gridsieve.client.prompt import Frames, Video
from gridsieve.common.channels import open_channel
from gridsieve.common.contract.retention import AUTO_THRESHOLD, PIXEL_CHANGE
from gridsieve.common.security.credentials import NO_CREDENTIALS

MINUTE = 60 * FPS
HEIGHT_PX, WIDTH_PX = 240, 320
WINDOW: Mapping[str, Any] = {"fps": FPS, "window_s": 60, "window_tokens": 8192, "answer_tokens": 128}
FLAGS = {"generation": ["--kv-cache-tokens", "49152", "--live-tokens", "24576"]}
AT_MOST = 0.15


def question(rounds: int) -> list[Row]:
    """A minute more for the session in every round; the first one is a warm-up."""
    return asyncio.run(_question(rounds))


async def _question(rounds: int) -> list[Row]:
    taken, tokens = Timings(), Timings()
    with tempfile.TemporaryDirectory() as folder:
        model = SMALL.save(SMALL.drawn(), Path(folder))
        async with (
            LocalStack(model, flags=FLAGS) as live,
            LocalStack(model, flags=FLAGS) as other,
            GridsieveClient(other.address) as client,
            open_channel(live.address, NO_CREDENTIALS) as channel,
            Session.opened(channel, **WINDOW) as session,
        ):
            for number in range(rounds + 1):
                frames, times_s = minute(0, number)
                await session.watch(frames, times_s)
                found = {"live": await session.first_token_s()}
                for again in ("generate", "generate again"):
                    found[again], computed = await _generated_s(client, frames, again)
                    tokens.add(again, computed)
                tokens.add("live", session.usage.held_tokens)
                for contender, seconds in found.items() if number else ():
                    taken.add(contender, seconds)
    note = (
        f"the session holds {tokens.median('live'):.0f} tokens; `Generate` computes {tokens.median('generate'):.0f}, "
        f"and asked another question about the same minute {tokens.median('generate again'):.0f}"
    )
    what = "first token of a question after a minute of video at 2 frames a second, 60 M"
    ours, cold, warm = (taken.median(contender) for contender in ("live", "generate", "generate again"))
    return [
        Row(what, "`Generate` about the same minute", ours, cold, "s", at_most=AT_MOST, note=note),
        Row(what, "`Generate` asked about it a second time", ours, warm, "s"),
    ]


def minute(camera: int, number: int) -> tuple[list[bytes], list[float]]:
    """The frames of a minute of a camera, and their times."""
    first = number * MINUTE
    return pictures(camera, first, MINUTE, HEIGHT_PX, WIDTH_PX), [(first + place) / FPS for place in range(MINUTE)]


async def _generated_s(client: GridsieveClient, frames: Sequence[bytes], name: str) -> tuple[float, int]:
    """The time to the first token, and how many tokens of the prompt were computed."""
    video = Video(frames=Frames(tuple(frames), tuple(place / FPS for place in range(len(frames)))))
    text = QUESTION if name == "generate" else "And what else?"
    timed, finished = await ask(
        client,
        video,
        text,
        pruning_method=PIXEL_CHANGE,
        pruning_rate=0,
        pruning_threshold=AUTO_THRESHOLD,
        max_new_tokens=2,
    )
    return timed.first_token_s, finished.usage.prompt_tokens - finished.usage.cached_prompt_tokens
