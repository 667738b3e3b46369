"""The engine's thread: it serves many callers, sleeps while nothing can run, and fails all requests when it ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
import torch

from common.contract.errors import Unavailable
from services.generation.request.batch import Window
from services.generation.sampling.sampler import SampledToken, SamplingParams
from tests.generation.engine_questions import ABOUT_VIDEO, KEPT, PROMPT, VIDEO, greedy_answer
from tests.tiny import Models, TinyEngine


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.002)


def test_requests_of_many_threads_are_answered(models: Models) -> None:
    tiny = TinyEngine(models.engine, blocks=24, max_num_batched_tokens=16, max_num_seqs=3)
    tiny.engine.start()

    def client(number: int) -> list[int]:
        asked = tiny.ask(str(number), ABOUT_VIDEO if number % 2 else PROMPT, SamplingParams(6))
        if number % 2:
            tiny.deliver(asked, 0, VIDEO, KEPT)
        until(lambda: bool(asked.finished))
        return asked.answer

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(client, range(12)))
    until(lambda: tiny.engine.stats().blocks_used == 0)
    tiny.engine.stop()
    assert answers[::2] == [greedy_answer(models, PROMPT, 6)] * 6
    assert answers[1::2] == [answers[1]] * 6


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


@pytest.mark.parametrize("cause", ["bug", "device", "rank"])
def test_an_engine_that_fails_ends_its_thread_and_all_requests(
    models: Models, monkeypatch: pytest.MonkeyPatch, cause: str
) -> None:
    ended, lost = threading.Event(), Mock(tell=Mock(side_effect=BrokenPipeError))
    tiny = TinyEngine(models.engine, on_end=ended.set, workers=lost if cause == "rank" else None)
    waits = tiny.ask("waits for media", [VIDEO, *PROMPT], SamplingParams(1))
    queued = tiny.ask("queued", PROMPT, SamplingParams(4))

    if cause == "bug":
        monkeypatch.setattr(tiny.engine, "_publish", Mock(side_effect=ZeroDivisionError))
    if cause == "device":
        monkeypatch.setattr(tiny.runner, "run", Mock(side_effect=torch.AcceleratorError("illegal memory access")))
    tiny.engine.start()
    assert ended.wait(20)
    assert not tiny.engine.alive
    for asked in (waits, queued):
        assert asked.failed
        assert isinstance(asked.failed.error, Unavailable)
    with pytest.raises(Unavailable):
        tiny.ask("late", PROMPT, SamplingParams(1))


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
    assert not tiny.engine.alive
    assert asked.failed
    assert isinstance(asked.failed.error, Unavailable)
    with pytest.raises(Unavailable):
        tiny.ask("late", PROMPT, SamplingParams(1))
    events = len(asked.events)
    go_on.set()
    tiny.engine.stop()
    assert len(asked.events) == events
