"""The engine step by step, and its thread: events, statistics, limits, cancellation and failures."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from fractions import Fraction
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from gridsieve.common.contract.errors import (
    GridsieveError,
    InvalidRequest,
    Overloaded,
    PeerContract,
    PromptTooLong,
    Unavailable,
)
from gridsieve.services.generation.engine.stats import Step
from gridsieve.services.generation.model.runner import LaunchedStep, SampledStep
from gridsieve.services.generation.request.batch import Chunk
from gridsieve.services.generation.request.encoded_media import MediaItem
from gridsieve.services.generation.request.request import Delta, Finished, FinishReason, PrefillStarted, Status
from gridsieve.services.generation.request.session import Session
from gridsieve.services.generation.sampling.sampler import SamplingParams
from tests.oracle import Item, Text
from tests.tiny import BLOCK_TOKENS, Models, TinyEngine

PROMPT = [Text((10, 11, 12, 13, 14))]
VIDEO = Item(2, 2, 2, Fraction(1), np.random.default_rng(1).normal(0, 0.3, (8, 64)).astype(np.float32), rate=0.25)
KEPT = [0, 1, 2, 3, 5, 7]
ABOUT_VIDEO = [Text((10, 11, 12, 13)), VIDEO, Text((14, 15))]


def greedy_answer(models: Models, parts: Sequence[Text | Item], new_tokens: int) -> list[int]:
    """The answer of an engine that runs nothing else."""
    engine = TinyEngine(models.engine)
    asked = engine.ask("alone", parts, SamplingParams(new_tokens))
    engine.drain()
    return asked.answer


@pytest.fixture
def tiny(models: Models) -> Iterator[TinyEngine]:
    """An engine whose blocks must all be free at the end of the test."""
    engine = TinyEngine(models.engine)
    yield engine
    engine.drain()
    engine.engine.check_integrity()
    assert engine.engine.stats().blocks_used == 0


# --- events ---------------------------------------------------------------------------------------------------------


def test_an_end_token_ends_the_answer_and_has_no_text(models: Models, tiny: TinyEngine) -> None:
    usual = greedy_answer(models, PROMPT, 8)
    end = usual[4]
    before = usual.index(end)
    asked = tiny.ask("a", PROMPT, SamplingParams(8, eos_ids=(end,)))
    tiny.drain()
    assert asked.answer == usual[: before + 1]
    assert asked.finished == Finished(FinishReason.STOP, before + 1)
    texts = [event.text for event in asked.events if isinstance(event, Delta)]
    assert "".join(texts) == "".join(f"{token} " for token in usual[:before])


def test_prefill_is_announced_when_the_last_media_item_has_arrived(tiny: TinyEngine) -> None:
    asked = tiny.ask("a", ABOUT_VIDEO, SamplingParams(1))
    tiny.drain()
    assert tiny.runner.steps == [[("a", 0, 4)]]
    assert asked.events == []
    tiny.deliver(asked, 0, VIDEO, KEPT)
    tiny.drain()
    assert tiny.runner.steps == [[("a", 0, 4)], [("a", 4, 12)]]
    assert asked.events[0] == PrefillStarted()


def test_preemption_and_neighbours_change_neither_a_seeded_answer_nor_its_one_announcement(models: Models) -> None:
    params = SamplingParams(12, temperature=1.0, seed=4, repetition_penalty=1.2)
    alone = TinyEngine(models.engine)
    expected = alone.ask("alone", PROMPT, params)
    alone.drain()
    tiny = TinyEngine(models.engine, blocks=6, max_num_batched_tokens=3)
    every = [tiny.ask(name, PROMPT, params) for name in "abc"]
    tiny.drain()
    assert tiny.totals["preemptions"] > 0
    for asked in every:
        assert asked.answer == expected.answer
        assert [event for event in asked.events if isinstance(event, PrefillStarted)] == [PrefillStarted()]


# --- limits ---------------------------------------------------------------------------------------------------------


def test_a_sequence_that_can_never_fit_is_refused(models: Models) -> None:
    tiny = TinyEngine(models.engine, blocks=3)
    tokens = 3 * BLOCK_TOKENS
    fits = tokens + 1 - len(PROMPT[0].ids)  # the last token of an answer is never computed
    with pytest.raises(PromptTooLong, match=f"need room for {tokens + 1} tokens, the cache holds {tokens}"):
        tiny.ask("a", PROMPT, SamplingParams(fits + 1))
    asked = tiny.ask("b", PROMPT, SamplingParams(fits))
    tiny.drain()
    assert asked.finished == Finished(FinishReason.LENGTH, fits)


def test_a_full_queue_refuses_until_a_request_ends(models: Models) -> None:
    tiny = TinyEngine(models.engine, max_num_seqs=1, max_waiting=1)
    with pytest.raises(InvalidRequest, match=r"sampling\.n must be at most 2, the number.*got 3"):
        tiny.ask("can never run", PROMPT, SamplingParams(2), [SamplingParams(2)] * 2)
    tiny.ask("a", PROMPT, SamplingParams(2))
    second = tiny.ask("b", ABOUT_VIDEO, SamplingParams(2))
    with pytest.raises(Overloaded, match="2 answers are running or waiting"):
        tiny.ask("c", PROMPT, SamplingParams(2))
    tiny.drain()
    assert tiny.ask("d", PROMPT, SamplingParams(2))
    tiny.engine.cancel(second.request)
    tiny.drain()
    tiny.ask("e", PROMPT, SamplingParams(2))
    tiny.ask("f", PROMPT, SamplingParams(2))


def test_requests_that_yield_leave_places_to_others(models: Models) -> None:
    tiny = TinyEngine(models.engine, max_num_seqs=4, max_waiting=4, max_yielding=5)
    for name in "abcde":
        tiny.ask(name, PROMPT, SamplingParams(2), yields=True)
    with pytest.raises(Overloaded, match=r"5 answers are .* limit of 5 of requests that yield to others"):
        tiny.ask("f", PROMPT, SamplingParams(2), yields=True)
    for name in "xyz":
        tiny.ask(name, PROMPT, SamplingParams(2))
    tiny.drain()
    tiny.ask("f", PROMPT, SamplingParams(2), yields=True)


# --- cancellation and failures --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("parts", "steps"), [(PROMPT, 0), (PROMPT, 3), (ABOUT_VIDEO, 1)])
def test_a_cancelled_request_frees_its_blocks_at_the_next_step_and_gets_no_more_events(
    tiny: TinyEngine, parts: list[Text | Item], steps: int
) -> None:
    asked = tiny.ask("a", parts, SamplingParams(50))
    for _ in range(steps):
        tiny.engine.step()
    tiny.engine.cancel(asked.request)
    events = len(asked.events)
    assert not tiny.engine.step()
    assert tiny.engine.stats().blocks_used == 0
    tiny.engine.cancel(asked.request)
    tiny.deliver(asked, 0, VIDEO, KEPT)
    assert not tiny.engine.step()
    assert len(asked.events) == events


def test_media_that_contradict_the_plan_fail_only_their_request(tiny: TinyEngine) -> None:
    asked, neighbour = tiny.ask("a", ABOUT_VIDEO, SamplingParams(2)), tiny.ask("b", PROMPT, SamplingParams(2))
    fewer = np.array(KEPT[:5], np.int32)
    tiny.engine.deliver(asked.request, MediaItem(0, fewer, torch.zeros(1, 5, 64), 0, bytes(32)))
    tiny.drain()
    assert asked.failed
    with pytest.raises(PeerContract, match="kept"):
        raise asked.failed.error
    assert neighbour.finished


@pytest.mark.parametrize(
    ("fault", "kind"),
    [(RuntimeError("the device caught fire"), GridsieveError), (torch.OutOfMemoryError("fire"), Overloaded)],
)
def test_a_request_that_fails_in_a_step_fails_alone(
    models: Models, tiny: TinyEngine, monkeypatch: pytest.MonkeyPatch, fault: Exception, kind: type[GridsieveError]
) -> None:
    asked, neighbour = tiny.ask("a", PROMPT, SamplingParams(5)), tiny.ask("b", [Text((10, 11, 15))], SamplingParams(5))
    tiny.engine.step()
    launch = tiny.runner.launch

    def failing(chunks: Sequence[Chunk], before: SampledStep | None) -> LaunchedStep:
        if any(chunk.request.id == "a" for chunk in chunks):
            raise fault
        return launch(chunks, before)

    with monkeypatch.context() as patched:
        patched.setattr(tiny.runner, "launch", failing)
        tiny.engine.step()
    assert asked.failed
    assert type(asked.failed.error) is kind
    assert "fire" not in str(asked.failed.error)
    tiny.drain()
    assert neighbour.answer == greedy_answer(models, [Text((10, 11, 15))], 5)


def test_an_answer_whose_text_cannot_be_decoded_fails_alone(tiny: TinyEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, neighbour = tiny.ask("a", PROMPT, SamplingParams(5)), tiny.ask("b", PROMPT, SamplingParams(5))
    monkeypatch.setattr(asked.request.detokenizer, "decode", Mock(side_effect=ValueError))
    tiny.drain()
    assert asked.failed
    assert neighbour.finished


def test_a_failing_listener_costs_only_its_own_request(tiny: TinyEngine) -> None:
    asked, neighbour = tiny.ask("a", PROMPT, SamplingParams(30)), tiny.ask("b", PROMPT, SamplingParams(3))
    asked.request.on_event = Mock(side_effect=RuntimeError("the loop is closed"))
    tiny.engine.step()
    tiny.engine.step()
    assert tiny.engine.stats().running == 1
    tiny.drain()
    assert neighbour.finished


# --- statistics -----------------------------------------------------------------------------------------------------


def test_stats_count_each_queue_and_date_its_longest_standing_request(models: Models) -> None:
    tiny = TinyEngine(models.engine, max_num_seqs=1)
    about = tiny.ask("about a video", ABOUT_VIDEO, SamplingParams(1))
    first, second = (tiny.ask(name, PROMPT, SamplingParams(4), [SamplingParams(4)]) for name in ("first", "second"))
    stats = tiny.engine.stats()
    assert (stats.running, stats.waiting, stats.awaiting_media, stats.awaiting_sibling) == (0, 2, 1, 2)
    assert stats.awaiting_media_since_ns == about.request.since_ns < first.request.since_ns
    assert stats.waiting_since_ns == first.request.since_ns < second.request.since_ns
    tiny.engine.step()
    stats = tiny.engine.stats()
    assert (stats.running, stats.running_since_ns) == (1, first.request.since_ns)
    assert stats.waiting_since_ns == second.request.since_ns < first.request.since_ns


def test_steps_count_the_tokens_of_prompts_and_answers(models: Models) -> None:
    steps: list[Step] = []
    tiny = TinyEngine(models.engine, max_num_batched_tokens=4, on_step=steps.append)
    tiny.ask("text", PROMPT, SamplingParams(3))
    tiny.drain()
    # 4 and 1 tokens of the prompt, then two of the answer, whose last token is never computed.
    counted = [(step.sequences, step.prompt_tokens, step.answer_tokens) for step in steps]
    assert counted == [(1, 4, 0), (1, 1, 0), (1, 0, 1), (1, 0, 1)]


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.002)


def test_the_thread_sleeps_while_nothing_can_run(models: Models) -> None:
    tiny = TinyEngine(models.engine)
    tiny.engine.start()
    waits = tiny.ask("waits", ABOUT_VIDEO, SamplingParams(1))
    until(lambda: tiny.totals["prompt_tokens"] == 4)
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


def test_stopping_just_before_a_step_reads_its_commands_ends_the_thread(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = TinyEngine(models.engine)
    step, stopping = tiny.engine.step, threading.Thread(target=tiny.engine.stop)

    def stopped_meanwhile() -> bool:
        if not stopping.is_alive():
            stopping.start()
        until(lambda: not tiny.engine._commands.empty())
        return step()

    monkeypatch.setattr(tiny.engine, "step", stopped_meanwhile)
    tiny.engine.start()
    tiny.engine._thread.join(10)
    ended = not tiny.engine._thread.is_alive()
    tiny.engine._wake()
    stopping.join()
    assert ended


@pytest.mark.parametrize("cause", ["bug", "device", "rank"])
def test_an_engine_that_fails_ends_its_thread_and_all_requests(
    models: Models, monkeypatch: pytest.MonkeyPatch, cause: str
) -> None:
    ended, lost = threading.Event(), Mock(broadcast=Mock(side_effect=BrokenPipeError))
    tiny = TinyEngine(models.engine, on_end=ended.set, workers=lost if cause == "rank" else None)
    waits = tiny.ask("waits for media", [VIDEO, *PROMPT], SamplingParams(1))
    queued = tiny.ask("queued", PROMPT, SamplingParams(4))
    opening = list[Future[None]]()  # a session, while the step fails

    def fail(*_: object) -> None:
        opening.append(tiny.engine.open(Session("live", 16, 16, BLOCK_TOKENS).lease))
        tiny.deliver(waits, 0, VIDEO, KEPT)
        tiny.engine.cancel(queued.request)
        raise torch.AcceleratorError("illegal memory access")

    if cause == "bug":
        monkeypatch.setattr(tiny.engine._stepper, "_publish", Mock(side_effect=ZeroDivisionError))
    if cause == "device":
        monkeypatch.setattr(tiny.runner, "launch", fail)
    tiny.engine.start()
    assert ended.wait(20)
    assert not tiny.engine.alive
    for each in opening:
        assert isinstance(each.exception(20), Unavailable)
        assert (waits.request.status, queued.request.status) == (Status.AWAITING_MEDIA, Status.RUNNING), "commands ran"
    for asked in (waits, queued):
        assert asked.failed
        assert isinstance(asked.failed.error, Unavailable)
    with pytest.raises(Unavailable):
        tiny.ask("late", PROMPT, SamplingParams(1))


def test_giving_up_fails_requests_without_waiting_for_the_step(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the device waited for a rank that never answers. How long the step takes is known."""
    tiny, begun, go_on = TinyEngine(models.engine), threading.Event(), threading.Event()
    launch = tiny.runner.launch

    def stuck(chunks: Sequence[Chunk], before: SampledStep | None) -> LaunchedStep:
        begun.set()
        assert go_on.wait(20)
        return launch(chunks, before)

    monkeypatch.setattr(tiny.runner, "launch", stuck)
    tiny.engine.start()
    asked = tiny.ask("a", PROMPT, SamplingParams(4))
    assert begun.wait(20)
    assert 0 < (tiny.engine.step_began_ns or 0) < time.monotonic_ns()
    tiny.engine.give_up()
    assert not tiny.engine.alive
    assert asked.failed
    assert isinstance(asked.failed.error, Unavailable)
    with pytest.raises(Unavailable):
        tiny.ask("late", PROMPT, SamplingParams(1))
    events = len(asked.events)
    go_on.set()
    tiny.engine.stop()
    assert tiny.engine.step_began_ns is None
    assert len(asked.events) == events
