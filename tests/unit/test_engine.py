"""One thread answers many: what comes in from other threads, what goes out as events, and what a failure costs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from common.errors import FramesieveError, InvalidRequest, Overloaded, PeerContract, PromptTooLong, Unavailable
from services.generation.answers import MediaItem
from services.generation.request import Event, Failed, Finished, FinishReason, PrefillStarted, Tokens
from services.generation.sampler import SamplingParams
from services.generation.windows import Packed, Window
from tests.oracle import Item, Text
from tests.tiny import BLOCK_TOKENS, Asked, Models, TinyEngine, load_models
from tests.unit.engine_questions import ABOUT_VIDEO, KEPT, PROMPT, VIDEO


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    torch.set_num_threads(1)
    return load_models("qwen2_5_vl", tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def tiny(models: Models) -> Iterator[TinyEngine]:
    """Its blocks are all free again when a test is done with it."""
    engine = TinyEngine(models.engine)
    yield engine
    engine.drain()
    engine.engine.check_integrity()
    assert engine.engine.stats().blocks_used == 0


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.002)


def greedy_answer(models: Models, parts: Sequence[Text | Item], new_tokens: int) -> list[int]:
    engine = TinyEngine(models.engine)
    asked = engine.ask("alone", parts, SamplingParams(new_tokens))
    engine.drain()
    return asked.answer


# --- events ---------------------------------------------------------------------------------------------------------


def test_an_answer_is_announced_streamed_and_finished(tiny: TinyEngine) -> None:
    asked = tiny.ask("a", PROMPT, SamplingParams(3, logprobs=True))
    tiny.drain()
    start, *tokens, end = asked.events
    assert start == PrefillStarted()
    assert end == Finished(FinishReason.LENGTH, 3)
    assert all(isinstance(token, Tokens) and len(token.token_ids) == 1 for token in tokens)
    rows = torch.stack(tiny.runner.logits["a"]).log_softmax(dim=-1)
    logprobs = [value for token in tokens if isinstance(token, Tokens) for value in token.logprobs]
    assert logprobs == pytest.approx(rows.amax(dim=-1).tolist())


def test_log_probabilities_are_left_out_unless_asked_for(tiny: TinyEngine) -> None:
    asked = tiny.ask("a", PROMPT, SamplingParams(2))
    tiny.drain()
    assert [event.logprobs for event in asked.events if isinstance(event, Tokens)] == [(), ()]


def test_an_end_token_ends_the_answer_without_becoming_text(models: Models, tiny: TinyEngine) -> None:
    usual = greedy_answer(models, PROMPT, 8)
    end = usual[4]
    before = usual.index(end)
    asked = tiny.ask("a", PROMPT, SamplingParams(8, eos_ids=(end,)))
    tiny.drain()
    assert asked.answer == usual[: before + 1]
    assert asked.finished == Finished(FinishReason.STOP, before + 1)
    texts = [event.text for event in asked.events if isinstance(event, Tokens)]
    assert "".join(texts) == "".join(f"{token} " for token in usual[:before])


class StopsAtThird:
    """A detokeniser that holds text back, and finds a stop string in the third token."""

    def __init__(self, stops: bool) -> None:
        self.stops, self.count = stops, 0

    def add(self, token_id: int) -> tuple[str, bool]:
        self.count += 1
        return "", self.stops and self.count == 3

    def flush(self) -> str:
        return "held back"


@pytest.mark.parametrize(
    ("stops", "finished", "text"),
    [(True, Finished(FinishReason.STOP, 3), ""), (False, Finished(FinishReason.LENGTH, 5), "held back")],
)
def test_a_stop_string_ends_the_answer_and_only_a_limit_releases_held_text(
    tiny: TinyEngine, stops: bool, finished: Finished, text: str
) -> None:
    asked = tiny.ask("a", PROMPT, SamplingParams(5))
    asked.request.detokeniser = StopsAtThird(stops)
    tiny.drain()
    assert asked.finished == finished
    assert "".join(event.text for event in asked.events if isinstance(event, Tokens)) == text


def test_prefill_starts_for_the_record_when_the_last_media_item_is_there(tiny: TinyEngine) -> None:
    asked = tiny.ask("a", ABOUT_VIDEO, SamplingParams(1))
    tiny.drain()
    assert tiny.runner.steps == [[("a", 0, 3)]]
    assert asked.events == []
    tiny.deliver(asked, 0, VIDEO, KEPT)
    tiny.drain()
    assert tiny.runner.steps == [[("a", 0, 3)], [("a", 3, 11)]]
    assert asked.events[0] == PrefillStarted()


def test_a_preempted_request_announces_its_prefill_once(models: Models) -> None:
    tiny = TinyEngine(models.engine, blocks=6)
    every = [tiny.ask(name, PROMPT, SamplingParams(12)) for name in "abc"]
    tiny.drain()
    assert tiny.engine.stats().totals.preemptions > 0
    for asked in every:
        assert [event for event in asked.events if isinstance(event, PrefillStarted)] == [PrefillStarted()]
        assert asked.answer == greedy_answer(models, PROMPT, 12)


def test_a_seeded_draw_does_not_depend_on_neighbours_or_preemption(models: Models) -> None:
    params = SamplingParams(12, temperature=1.0, seed=4, repetition_penalty=1.2)
    alone = TinyEngine(models.engine)
    expected = alone.ask("alone", PROMPT, params)
    alone.drain()
    tiny = TinyEngine(models.engine, blocks=6, chunk_tokens=3)
    every = [tiny.ask(name, PROMPT, params) for name in "abc"]
    tiny.drain()
    assert tiny.engine.stats().totals.preemptions > 0
    assert [asked.answer for asked in every] == [expected.answer] * 3


# --- limits ---------------------------------------------------------------------------------------------------------


def test_a_sequence_that_can_never_fit_is_refused(models: Models) -> None:
    tiny = TinyEngine(models.engine, blocks=3)
    tokens = 3 * BLOCK_TOKENS
    assert tiny.engine.capacity_tokens == tokens
    fits = tokens + 1 - len(PROMPT[0].ids)  # the last token of an answer needs no room
    with pytest.raises(PromptTooLong, match=f"need room for {tokens + 1} tokens, the cache holds {tokens}"):
        tiny.ask("a", PROMPT, SamplingParams(fits + 1))
    asked = tiny.ask("b", PROMPT, SamplingParams(fits))
    tiny.drain()
    assert asked.finished == Finished(FinishReason.LENGTH, fits)


def test_a_full_queue_refuses_until_somebody_leaves(models: Models) -> None:
    tiny = TinyEngine(models.engine, max_running=1, max_waiting=1)
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


def test_more_answers_than_may_ever_run_and_wait_are_refused_for_good(models: Models) -> None:
    tiny = TinyEngine(models.engine, max_running=1, max_waiting=2)
    with pytest.raises(InvalidRequest, match=r"sampling\.n must be at most 3 here.*got 4"):
        tiny.ask("a", PROMPT, SamplingParams(2), [SamplingParams(2)] * 3)


# --- cancellation and failures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [PROMPT, ABOUT_VIDEO])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_cancelled_request_frees_its_blocks_at_the_next_step_and_is_not_heard_of_again(
    tiny: TinyEngine, steps: int, parts: list[Text | Item]
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


@pytest.mark.parametrize(
    ("kept", "embeds", "message"),
    [
        ([0, 1, 2, 3, 5], torch.zeros(1, 6, 64), "must keep 6 tokens"),
        (KEPT, torch.zeros(1, 5, 64), r"are \[1, 5, 64\], not \[1, 6, 64\]"),
        (KEPT, torch.zeros(2, 6, 64), r"are \[2, 6, 64\]"),
        (KEPT, torch.zeros(1, 6, 32), r"are \[1, 6, 32\]"),
    ],
)
def test_media_that_contradict_the_plan_fail_their_request_alone(
    tiny: TinyEngine, kept: list[int], embeds: Tensor, message: str
) -> None:
    asked, neighbour = tiny.ask("a", ABOUT_VIDEO, SamplingParams(2)), tiny.ask("b", PROMPT, SamplingParams(2))
    tiny.engine.deliver(asked.request, MediaItem(0, np.array(kept, np.int32), embeds, 0, bytes(32)))
    tiny.drain()
    assert asked.failed
    with pytest.raises(PeerContract, match=message):
        raise asked.failed.error
    assert neighbour.finished


def test_a_failing_forward_fails_the_requests_of_its_step_and_no_other(
    models: Models, tiny: TinyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = tiny.ask("a", PROMPT, SamplingParams(5))
    later = tiny.ask("b", ABOUT_VIDEO, SamplingParams(5))
    tiny.engine.step()
    working = tiny.runner.run

    def broken(windows: Sequence[Window]) -> tuple[list[Window], Tensor]:
        raise RuntimeError("the device caught fire")

    monkeypatch.setattr(tiny.runner, "run", broken)
    tiny.engine.step()
    monkeypatch.setattr(tiny.runner, "run", working)
    assert isinstance(asked.events[-1], Failed)
    assert "fire" not in str(asked.events[-1].error)
    tiny.deliver(later, 0, VIDEO, KEPT)
    tiny.drain()
    assert later.finished == Finished(FinishReason.LENGTH, 5)
    assert tiny.ask("c", PROMPT, SamplingParams(1))


def test_a_listener_that_fails_loses_its_answer_and_nobody_elses(tiny: TinyEngine) -> None:
    asked, neighbour = tiny.ask("a", PROMPT, SamplingParams(30)), tiny.ask("b", PROMPT, SamplingParams(3))

    def gone(event: Event) -> None:
        raise RuntimeError("the loop is closed")

    asked.request.on_event = gone
    tiny.engine.step()
    tiny.engine.step()
    assert tiny.engine.stats().running == 1
    tiny.drain()
    assert neighbour.finished


def test_a_poisoned_neighbour_changes_nothing(models: Models, tiny: TinyEngine) -> None:
    """NaN embeddings reach the cache, and the blocks are used again, but another request never reads them."""
    poison = Item(2, 2, 2, Fraction(1), np.full((8, 64), np.nan, np.float32), rate=0.25)
    for _ in range(2):
        poisoned = tiny.ask("poisoned", [Text((10,) * 9), poison, Text((11,))], SamplingParams(7))
        tiny.deliver(poisoned, 0, poison, KEPT)
        every = [tiny.ask(str(n), [Text((10, 11, 12, 13, 14)[: n + 2])], SamplingParams(9)) for n in range(3)]
        tiny.drain()
        for n, asked in enumerate(every):
            assert asked.answer == greedy_answer(models, [Text((10, 11, 12, 13, 14)[: n + 2])], 9)
    assert all(torch.isfinite(torch.stack(tiny.runner.logits[str(n)])).all() for n in range(3))


# --- the thread -----------------------------------------------------------------------------------------------------


def test_many_threads_are_answered_by_one(models: Models) -> None:
    tiny = TinyEngine(models.engine, blocks=24, chunk_tokens=16, max_running=3)
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


def test_the_thread_sleeps_while_there_is_nothing_to_run(models: Models) -> None:
    tiny = TinyEngine(models.engine)
    tiny.engine.start()
    waits = tiny.ask("waits", ABOUT_VIDEO, SamplingParams(1))
    until(lambda: tiny.engine.stats().totals.steps == 1)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1
    assert tiny.engine.stats().totals.steps == 1
    assert tiny.engine.stats().awaiting_media == 1
    tiny.deliver(waits, 0, VIDEO, KEPT)
    until(lambda: bool(waits.finished))
    tiny.engine.stop()


def test_stopping_fails_what_is_left_and_refuses_what_comes(models: Models) -> None:
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


def test_a_bug_in_a_command_fails_its_request_and_the_thread_lives_on(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_bug_that_ends_the_thread_leaves_nobody_waiting(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    tiny = TinyEngine(models.engine, on_end=ended.set)
    waits = tiny.ask("waits for media", ABOUT_VIDEO, SamplingParams(1))
    tiny.drain()

    def broken(windows: Sequence[Window], began_ns: int) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(tiny.engine, "_publish", broken)
    queued = tiny.ask("queued", PROMPT, SamplingParams(4))
    tiny.engine.start()
    until(lambda: not tiny.engine.alive)
    for asked in (waits, queued):
        until(lambda asked=asked: bool(asked.failed))  # type: ignore[misc]
        assert asked.failed
        assert isinstance(asked.failed.error, Unavailable)
    with pytest.raises(Unavailable):
        tiny.ask("late", PROMPT, SamplingParams(1))
    assert ended.wait(20)


def test_a_device_that_is_lost_ends_the_thread(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = TinyEngine(models.engine)
    tiny.engine.start()
    waits = tiny.ask("waits for media", ABOUT_VIDEO, SamplingParams(1))
    until(lambda: tiny.engine.stats().awaiting_media == 1)
    assert tiny.engine.alive

    def broken(windows: Sequence[Window]) -> None:
        raise torch.AcceleratorError("an illegal memory access was encountered")

    monkeypatch.setattr(tiny.runner, "run", broken)
    running = tiny.ask("runs", PROMPT, SamplingParams(1))
    for asked in (waits, running):
        until(lambda asked=asked: bool(asked.failed))  # type: ignore[misc]
        assert asked.failed
        assert isinstance(asked.failed.error, Unavailable)
    until(lambda: not tiny.engine.alive)


def test_a_rank_that_is_lost_ends_the_thread(models: Models) -> None:
    class Gone:
        def tell(self, packed: Packed, features: Tensor | None) -> None:
            raise BrokenPipeError

    ended = threading.Event()
    tiny = TinyEngine(models.engine, on_end=ended.set, followers=Gone())
    tiny.engine.start()
    assert not ended.is_set()
    asked = tiny.ask("a", PROMPT, SamplingParams(1))
    until(lambda: bool(asked.failed))
    assert asked.failed
    assert isinstance(asked.failed.error, Unavailable)
    assert ended.wait(20)
    assert not tiny.engine.alive


def test_nobody_waits_for_a_step_that_is_given_up(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the device waits for another rank, which will never answer."""
    tiny, begun, go_on = TinyEngine(models.engine), threading.Event(), threading.Event()
    run = tiny.runner.run

    def stuck(windows: Sequence[Window]) -> tuple[list[Window], Tensor]:
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
