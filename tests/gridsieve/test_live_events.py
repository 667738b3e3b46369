"""Events of a live session, from the responses of a service."""

from __future__ import annotations

from gridsieve.client.events import LiveEvents
from gridsieve.client.live_events import LiveFinished, LiveRefused
from gridsieve.v1 import generation_pb2
from gridsieve.v1.generation_pb2 import LiveResponse


def said(name: str, text: str) -> LiveResponse:
    delta = generation_pb2.Delta(text=text, token_ids=[len(text)])
    return LiveResponse(delta=generation_pb2.LiveDelta(ask_id=name, delta=delta))


def ended(name: str, reason: generation_pb2.FinishReason, error: str = "") -> LiveResponse:
    finished = generation_pb2.Finished(reason=reason)
    return LiveResponse(finished=generation_pb2.LiveFinished(ask_id=name, finished=finished, error=error))


def test_an_answer_is_whole_though_another_question_is_refused_meanwhile() -> None:
    events = LiveEvents("session", {"a": "What moves?", "b": "?"})
    responses = (
        said("a", "A red "),
        ended("b", generation_pb2.FINISH_REASON_REFUSED, "sampling.temperature must be at least 0, got -1"),
        said("a", "square"),
        ended("a", generation_pb2.FINISH_REASON_STOP),
    )
    _, refused, _, finished = [events.of(each) for each in responses]
    assert isinstance(refused, LiveRefused)
    assert isinstance(finished, LiveFinished)
    assert (finished.answer.text, finished.answer.token_ids) == ("A red square", (6, 6))
