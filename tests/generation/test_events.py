"""Events on their way from the engine's thread to the responses of an RPC."""

from __future__ import annotations

from unittest.mock import Mock

from gridsieve.services.generation.answers.events import Events, Inbox
from gridsieve.services.generation.answers.messages import response_of
from gridsieve.services.generation.answers.text import Answers
from gridsieve.services.generation.request.request import Delta, Finished, FinishReason
from gridsieve.services.generation.stage_clock import StageClock
from gridsieve.v1.generation_pb2 import Usage

STEPS = [[Delta("a", (1,), (-0.5,)), Delta("x", (7,), ())], [Delta("b", (2,), (-0.25,)), Delta("y", (8,), ())]]


async def test_tokens_that_arrived_together_are_one_response_of_their_answer() -> None:
    events = Events(Inbox(), 2)
    for step in STEPS:
        for index, event in enumerate(step):
            events.listener(index)(event)
    events.listener(0)(Finished(FinishReason.STOP, 2))
    clock, tokenizer = StageClock(), Mock(decode=Mock(return_value="?"))
    answers = Answers(Mock(cached_tokens=0), 2, clock, tokenizer)
    first, second, end = (response_of(told, Usage(), clock, tokenizer) for told in answers.of(await events.next()))
    assert (first.delta.choice_index, first.delta.text) == (0, "ab")
    assert (list(first.delta.token_ids), list(first.delta.logprobs)) == ([1, 2], [-0.5, -0.25])
    assert (second.delta.choice_index, second.delta.text, list(second.delta.token_ids)) == (1, "xy", [7, 8])
    assert end.HasField("finished")
