"""Time to first token of a question in a session that is an hour old, and in one that is a minute old.

The tower is the small one: no question waits for it, and the hour passes sooner.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

from benchmarks.live.question import FLAGS, WINDOW, minute
from benchmarks.live.session import Session
from benchmarks.models import RANDOM
from benchmarks.table import Row, Timings
from gridsieve.cli.launcher import LocalStack
from gridsieve.common.channels import open_channel
from gridsieve.common.security.credentials import NO_CREDENTIALS

OLD_MINUTES = 60
QUESTIONS_A_ROUND = 5
AT_MOST = 1.1


def age(rounds: int) -> list[Row]:
    """Both sessions watch with a window of a minute; frames are sent as fast as they are taken."""
    return asyncio.run(_age(rounds))


async def _age(rounds: int) -> list[Row]:
    taken = Timings()
    with tempfile.TemporaryDirectory() as folder:
        model = RANDOM.save(RANDOM.drawn(), Path(folder))
        async with (
            LocalStack(model, flags=FLAGS) as stack,
            open_channel(stack.address, NO_CREDENTIALS) as channel,
            Session.opened(channel, **WINDOW) as old,
            Session.opened(channel, **WINDOW) as young,
        ):
            for number in range(OLD_MINUTES):
                await old.watch(*minute(0, number))
                print(f"minute {number + 1} of {OLD_MINUTES}", file=sys.stderr)
            await young.watch(*minute(1, 0))
            for number in range(QUESTIONS_A_ROUND * rounds + 1):
                for name, session in (("old", old), ("young", young)):
                    seconds = await session.first_token_s()
                    if number:  # the first is a warm-up
                        taken.add(name, seconds)
    note = (
        f"the sessions hold {old.usage.held_tokens} and {young.usage.held_tokens} tokens; dropped: {old.dropped} frames"
    )
    what = f"first token of a question after {OLD_MINUTES} minutes of video, 60 M"
    ours, theirs = taken.median("old"), taken.median("young")
    return [Row(what, "after one minute", ours, theirs, "s", at_most=AT_MOST, note=note)]
