"""One question of a load: what is timed from when, and what a record says of a failure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from common.contract.errors import Overloaded
from common.contract.retention import Pruning
from framesieve.bench.measure import Record, timed
from framesieve.bench.workload import Question
from framesieve.client.answer import Accepted, Delta, Event, Finished, FinishReason, Timings, Usage
from framesieve.client.client import FramesieveClient
from framesieve.client.prompt import Options
from tests.preprocessing.instant_loop import run

USAGE = Usage(prompt_tokens_full=100, prompt_tokens=40, completion_tokens=3, media=())
TIMINGS = Timings(0.1, 0, 0.1, 0, 0, 0, 0, 0, 0, 0, 0, generate_s=0.1)
ANSWER: list[Event | float] = [
    Accepted("r", USAGE),
    0.05,
    Delta(0, "", (), ()),
    0.1,
    Delta(0, "A", (1,), ()),
    0.2,
    Delta(0, "BC", (2, 3), ()),
    0.05,
    Finished(0, FinishReason.STOP, USAGE, TIMINGS),
]


class FakeClient:
    """Yields events, waits where there is a number, raises where there is an error."""

    address = "nowhere"

    def __init__(self, script: list[Any]) -> None:
        self.script = script
        self.options: dict[str, Any] = {}

    async def stream(self, media: object, question: str, **options: Any) -> AsyncIterator[Event]:
        self.options = options
        for step in self.script:
            if isinstance(step, float):
                await asyncio.sleep(step)
            elif isinstance(step, Exception):
                raise step
            else:
                yield step


async def measured(client: FakeClient, *, late_s: float = 0.0, began_ago_s: float = 10.0, **question: Any) -> Record:
    """late_s: how long ago the question was due."""
    now_s = asyncio.get_running_loop().time()
    asked = Question(None, "?", Pruning(0.5, "random"), **question)
    options = Options(max_new_tokens=64, timeout_s=9.0)
    return await timed(cast(FramesieveClient, client), 4, asked, now_s - late_s, now_s - began_ago_s, options)


def test_times_count_from_when_a_question_was_due() -> None:
    record = run(measured(FakeClient(ANSWER), late_s=2.0))
    assert (record.number, record.pruning, record.failure) == (4, Pruning(0.5, "random"), None)
    assert (record.due_s, record.begun_s) == pytest.approx((8.0, 10.0), abs=1e-6)
    # A message without tokens is no first token.
    assert record.first_token_s == pytest.approx(2.15, abs=1e-6)
    assert record.token_gaps_s == pytest.approx((0.1, 0.1), abs=1e-6)
    assert record.total_s == pytest.approx(2.4, abs=1e-6)
    assert (record.usage, record.timings) == (USAGE, TIMINGS)


def test_a_questions_own_settings_come_over_the_runs() -> None:
    client = FakeClient(ANSWER[-1:])
    run(measured(client))
    told = {"pruning_rate": 0.5, "pruning_method": "random", "timeout_s": 9.0}
    assert client.options == {**told, "max_new_tokens": 64}
    run(measured(client, max_new_tokens=5))
    assert client.options == {**told, "max_new_tokens": 5}


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ([*ANSWER[:5], Overloaded("the queue is full")], ("RESOURCE_EXHAUSTED", "OVERLOADED", "the queue is full")),
        ([OSError(2, "No such file", "clip.mp4")], ("CLIENT", "FILE", "clip.mp4: No such file")),
        (
            ANSWER[:5],
            ("INTERNAL", "PEER_CONTRACT", "the stream from nowhere ended before all completions were finished"),
        ),
    ],
    ids=["refused midway", "a file that is gone", "an answer without an end"],
)
def test_what_fails_has_a_reason_and_no_times_of_tokens(script: list[Any], told: tuple[str, ...]) -> None:
    record = run(measured(FakeClient(script)))
    assert record.failure is not None
    assert (record.failure.status, record.failure.reason, record.failure.message) == told
    assert (record.first_token_s, record.token_gaps_s, record.usage, record.timings) == (None, (), None, None)


async def test_a_cancellation_is_raised() -> None:
    asking = asyncio.create_task(measured(FakeClient([30.0])))
    await asyncio.sleep(0.01)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
