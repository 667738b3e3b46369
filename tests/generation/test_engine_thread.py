"""The engine's thread: it serves many callers, sleeps while nothing can run, and fails all requests when it ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from common.contract.errors import FramesieveError, Unavailable
from services.generation.request.batch import Packed, Window
from services.generation.request.request import Failed
from services.generation.sampling.sampler import SampledToken, SamplingParams
from tests.generation.engine_questions import ABOUT_VIDEO, KEPT, PROMPT, VIDEO, greedy_answer
from tests.tiny import Asked, Models, TinyEngine

pytest_plugins = ["tests.generation.engine_fixtures"]


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.002)


def test_requests_of_many_threads_are_answered(models: Models) -> None:
    tiny = TinyEngine(models.engine, blocks=24, max_num_batched_tokens=16, max_num_seqs=3)
    tiny.engine.start()
    answers: dict[int, Asked] = {}

    def client(number: int) -> None:
        parts = ABOUT_VIDEO if number % 2 else PROMPT
        asked = tiny.ask(str(number), parts, SamplingParams(6))
        answers[number] = asked
        if number % 2:
            time.sleep(0.01 * (number % 5))
            tiny.deliver(asked, 0, VIDEO, KEPT)
        until(lambda: bool(asked.finished))

    threads = [threading.Thread(target=client, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    until(lambda: tiny.engine.stats().blocks_used == 0)
    tiny.engine.stop()
    text_answer = greedy_answer(models, PROMPT, 6)
    for number, asked in answers.items():
        if number % 2 == 0:
            assert asked.answer == text_answer
        else:
            assert asked.answer == answers[1].answer


def test_the_thread_sleeps_while_nothing_can_run(models: Models) -> None:
    tiny = TinyEngine(models.engine)
    tiny.engine.start()
    waits = tiny.ask("waits", ABOUT_VIDEO, SamplingParams(1))
    until(lambda: tiny.engine.stats().totals.tokens == 3)
    assert tiny.engine._thread.ident is not None
    spent = time.pthread_getcpuclockid(tiny.engine._thread.ident)
    before = time.clock_gettime(spent)
    time.sleep(0.3)
    assert time.clock_gettime(spent) - before < 0.1
    assert len(tiny.runner.steps) == 1
    assert tiny.engine.stats().awaiting_media == 1
    tiny.deliver(waits, 0, VIDEO, KEPT)
    until(lambda: bool(waits.finished))
    tiny.engine.stop()


def test_stopping_fails_unfinished_requests_and_refuses_new_ones(models: Models) -> None:
    ended = threading.Event()
    tiny = TinyEngine(models.engine, on_end=ended.set)
    tiny.engine.start()
    waits = tiny.ask("waits", ABOUT_VIDEO, SamplingParams(1))
    tiny.engine.stop()
    assert not ended.is_set()
    assert waits.failed
    assert isinstance(waits.failed.error, Unavailable)
    assert waits.failed.error.stage == "generation"
    with pytest.raises(Unavailable, match="has ended"):
        tiny.ask("late", PROMPT, SamplingParams(1))


def test_a_bug_in_a_command_fails_only_its_request(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = TinyEngine(models.engine)
    tiny.engine.start()
    asked = tiny.ask("a", ABOUT_VIDEO, SamplingParams(1))

    def broken(media_index: int, kept: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(asked.request.rope, "deliver", broken)
    tiny.deliver(asked, 0, VIDEO, KEPT)
    until(lambda: bool(asked.failed))
    assert asked.failed
    assert type(asked.failed.error) is FramesieveError
    after = tiny.ask("b", PROMPT, SamplingParams(1))
    until(lambda: bool(after.finished))
    tiny.engine.stop()


class LostRank:
    def tell(self, packed: Packed, features: Tensor | None) -> None:
        raise BrokenPipeError


@pytest.mark.parametrize("cause", ["bug", "device", "rank"])
def test_an_engine_that_fails_ends_its_thread_and_all_requests(
    models: Models, monkeypatch: pytest.MonkeyPatch, cause: str
) -> None:
    ended = threading.Event()
    tiny = TinyEngine(models.engine, on_end=ended.set, workers=LostRank() if cause == "rank" else None)
    waits = tiny.ask("waits for media", [VIDEO, *PROMPT], SamplingParams(1))
    queued = tiny.ask("queued", PROMPT, SamplingParams(4))

    def broken(*_: object) -> None:
        raise (ZeroDivisionError if cause == "bug" else torch.AcceleratorError("illegal memory access"))

    if cause == "bug":
        monkeypatch.setattr(tiny.engine, "_publish", broken)
    if cause == "device":
        monkeypatch.setattr(tiny.runner, "run", broken)
    assert not ended.is_set()
    tiny.engine.start()
    assert ended.wait(20)
    assert not tiny.engine.alive
    for asked in (waits, queued):
        assert asked.failed
        assert isinstance(asked.failed.error, Unavailable)
    with pytest.raises(Unavailable):
        tiny.ask("late", PROMPT, SamplingParams(1))


def test_the_device_of_the_model_is_current_in_the_thread(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny, current, seen = TinyEngine(models.engine), list[Tensor](), list[Tensor]()
    run = tiny.runner.run

    @contextmanager
    def of(tensor: Tensor) -> Iterator[None]:
        current.append(tensor)
        yield
        current.clear()

    def note(windows: Sequence[Window]) -> dict[Window, list[SampledToken]]:
        seen.extend(current)
        return run(windows)

    monkeypatch.setattr(torch.cuda, "device_of", of)
    monkeypatch.setattr(tiny.runner, "run", note)
    tiny.engine.start()
    asked = tiny.ask("a", PROMPT, SamplingParams(1))
    until(lambda: bool(asked.finished))
    tiny.engine.stop()
    assert [tensor is models.engine.embed_tokens.weight for tensor in seen] == [True]
    assert not current


def test_giving_up_fails_requests_without_waiting_for_the_step(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the device waited for a rank that never answers."""
    tiny, begun, go_on = TinyEngine(models.engine), threading.Event(), threading.Event()
    run = tiny.runner.run

    def stuck(windows: Sequence[Window]) -> dict[Window, list[SampledToken]]:
        begun.set()
        assert go_on.wait(20)
        return run(windows)

    monkeypatch.setattr(tiny.runner, "run", stuck)
    tiny.engine.start()
    asked = tiny.ask("a", PROMPT, SamplingParams(4))
    assert begun.wait(20)
    tiny.engine.give_up()
    tiny.engine.give_up()
    assert not tiny.engine.alive
    (failed,) = asked.events[-1:]
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, Unavailable)
    assert failed.error.stage == "generation"
    with pytest.raises(Unavailable):
        tiny.ask("late", PROMPT, SamplingParams(1))
    go_on.set()
    tiny.engine.stop()
    assert asked.events[-1] is failed
    assert sum(isinstance(event, Failed) for event in asked.events) == 1
