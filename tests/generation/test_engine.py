"""The engine step by step: events, statistics, limits, cancellation and failures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from time import monotonic_ns

import numpy as np
import pytest
import torch
from torch import Tensor

from common.contract.errors import InvalidRequest, Overloaded, PeerContract, PromptTooLong
from services.generation.engine.stats import Step
from services.generation.request.batch import Window
from services.generation.request.encoded_media import MediaItem
from services.generation.request.request import Event, Failed, Finished, FinishReason, PrefillStarted, Tokens
from services.generation.sampling.sampler import SampledToken, SamplingParams
from tests.generation.engine_questions import ABOUT_VIDEO, KEPT, PROMPT, VIDEO, greedy_answer
from tests.oracle import Item, Text
from tests.tiny import BLOCK_TOKENS, Models, TinyEngine

pytest_plugins = ["tests.generation.engine_fixtures"]


@pytest.fixture
def tiny(models: Models) -> Iterator[TinyEngine]:
    """An engine whose blocks must all be free at the end of the test."""
    engine = TinyEngine(models.engine)
    yield engine
    engine.drain()
    engine.engine.check_integrity()
    assert engine.engine.stats().blocks_used == 0


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
    without = tiny.ask("b", PROMPT, SamplingParams(1))
    tiny.drain()
    assert [event.logprobs for event in without.events if isinstance(event, Tokens)] == [()]


def test_an_end_token_ends_the_answer_and_has_no_text(models: Models, tiny: TinyEngine) -> None:
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
    """A detokenizer that holds text back and finds a stop string in the third token."""

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
def test_a_stop_string_ends_the_answer_and_held_text_is_sent_only_at_the_limit(
    tiny: TinyEngine, stops: bool, finished: Finished, text: str
) -> None:
    asked = tiny.ask("a", PROMPT, SamplingParams(5))
    asked.request.detokenizer = StopsAtThird(stops)
    tiny.drain()
    assert asked.finished == finished
    assert "".join(event.text for event in asked.events if isinstance(event, Tokens)) == text


def test_prefill_is_announced_when_the_last_media_item_has_arrived(tiny: TinyEngine) -> None:
    asked = tiny.ask("a", ABOUT_VIDEO, SamplingParams(1))
    tiny.drain()
    assert tiny.runner.steps == [[("a", 0, 3)]]
    assert asked.events == []
    tiny.deliver(asked, 0, VIDEO, KEPT)
    tiny.drain()
    assert tiny.runner.steps == [[("a", 0, 3)], [("a", 3, 11)]]
    assert asked.events[0] == PrefillStarted()


def test_preemption_and_neighbours_change_neither_a_seeded_answer_nor_its_one_announcement(models: Models) -> None:
    params = SamplingParams(12, temperature=1.0, seed=4, repetition_penalty=1.2)
    alone = TinyEngine(models.engine)
    expected = alone.ask("alone", PROMPT, params)
    alone.drain()
    tiny = TinyEngine(models.engine, blocks=6, max_num_batched_tokens=3)
    every = [tiny.ask(name, PROMPT, params) for name in "abc"]
    tiny.drain()
    assert tiny.engine.stats().totals.preemptions > 0
    for asked in every:
        assert asked.answer == expected.answer
        assert [event for event in asked.events if isinstance(event, PrefillStarted)] == [PrefillStarted()]


# --- devices --------------------------------------------------------------------------------------------------------


def test_delivered_embeddings_move_to_the_device_and_the_cached_last_rows_stay_on_the_host(
    tiny: TinyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = tiny.ask("a", ABOUT_VIDEO, SamplingParams(5))

    def send(tensor: Tensor, device: torch.device) -> Tensor:
        assert device == tiny.model.device
        return tensor.to("meta")

    with monkeypatch.context() as patched:
        patched.setattr("services.generation.engine.engine.tensor_to_device", send)
        tiny.deliver(asked, 0, VIDEO, KEPT)
        tiny.engine._run_commands()
    [embeds], [answer] = asked.request.embeds, asked.request.encoded_media
    assert embeds is not None
    assert embeds.is_meta
    assert answer
    assert answer.last_rows.is_cpu
    tiny.engine.cancel(asked.request)


def test_last_rows_move_to_the_device_in_the_step_that_reads_them(
    tiny: TinyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = tiny.ask("a", ABOUT_VIDEO, SamplingParams(5))
    tiny.deliver(first, 0, VIDEO, KEPT)
    tiny.drain()
    sent: list[torch.Size] = []

    def send(tensor: Tensor, device: torch.device) -> Tensor:
        sent.append(tensor.shape)
        return tensor.to(device)

    monkeypatch.setattr("services.generation.model.runner.tensor_to_device", send)
    again = tiny.ask("b", [*ABOUT_VIDEO[:2], Text((20, 21))], SamplingParams(5))
    tiny.drain()
    assert again.spared == (0,)
    assert again.finished
    assert sent == [(1, 1, 64)]  # 3 tokens of text and 6 of media: two blocks are cached, one row is behind them


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


def test_an_n_above_all_places_of_the_engine_is_an_invalid_request(models: Models) -> None:
    tiny = TinyEngine(models.engine, max_num_seqs=1, max_waiting=2)
    with pytest.raises(InvalidRequest, match=r"sampling\.n must be at most 3 here.*got 4"):
        tiny.ask("a", PROMPT, SamplingParams(2), [SamplingParams(2)] * 3)


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


@pytest.mark.parametrize(
    ("kept", "embeds", "message"),
    [
        ([0, 1, 2, 3, 5], torch.zeros(1, 6, 64), "must keep 6 tokens"),
        (KEPT, torch.zeros(1, 5, 64), r"are \[1, 5, 64\], not \[1, 6, 64\]"),
        (KEPT, torch.zeros(2, 6, 64), r"are \[2, 6, 64\]"),
        (KEPT, torch.zeros(1, 6, 32), r"are \[1, 6, 32\]"),
    ],
)
def test_media_that_contradict_the_plan_fail_only_their_request(
    tiny: TinyEngine, kept: list[int], embeds: Tensor, message: str
) -> None:
    asked, neighbour = tiny.ask("a", ABOUT_VIDEO, SamplingParams(2)), tiny.ask("b", PROMPT, SamplingParams(2))
    tiny.engine.deliver(asked.request, MediaItem(0, np.array(kept, np.int32), embeds, 0, bytes(32)))
    tiny.drain()
    assert asked.failed
    with pytest.raises(PeerContract, match=message):
        raise asked.failed.error
    assert neighbour.finished


def test_a_failing_forward_fails_only_the_requests_of_its_step(
    models: Models, tiny: TinyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = tiny.ask("a", PROMPT, SamplingParams(5))
    later = tiny.ask("b", ABOUT_VIDEO, SamplingParams(5))
    tiny.engine.step()
    working = tiny.runner.run

    def broken(windows: Sequence[Window]) -> dict[Window, list[SampledToken]]:
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


@pytest.mark.parametrize("where", ["run", "deliver"])
def test_a_device_out_of_memory_is_overloaded(tiny: TinyEngine, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Only the requests of the step fail, or the one whose media arrived."""

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    asked = tiny.ask("a", ABOUT_VIDEO, SamplingParams(5))
    with monkeypatch.context() as patched:
        if where == "run":
            patched.setattr(tiny.runner, "run", full)
        else:
            patched.setattr("services.generation.engine.engine.tensor_to_device", full)
            tiny.deliver(asked, 0, VIDEO, KEPT)
        tiny.drain()
    assert asked.failed
    assert isinstance(asked.failed.error, Overloaded)
    assert "GiB" not in str(asked.failed.error)
    later = tiny.ask("b", PROMPT, SamplingParams(2))
    tiny.drain()
    assert later.finished


def test_a_failing_listener_costs_only_its_own_request(tiny: TinyEngine) -> None:
    asked, neighbour = tiny.ask("a", PROMPT, SamplingParams(30)), tiny.ask("b", PROMPT, SamplingParams(3))

    def gone(event: Event) -> None:
        raise RuntimeError("the loop is closed")

    asked.request.on_event = gone
    tiny.engine.step()
    tiny.engine.step()
    assert tiny.engine.stats().running == 1
    tiny.drain()
    assert neighbour.finished


def test_nan_embeddings_of_a_neighbour_change_nothing(models: Models, tiny: TinyEngine) -> None:
    """NaN reach the cache and the blocks are used again, but no other request reads them."""
    poison = Item(2, 2, 2, Fraction(1), np.full((8, 64), np.nan, np.float32), rate=0.25)
    for _ in range(2):
        poisoned = tiny.ask("poisoned", [Text((10,) * 9), poison, Text((11,))], SamplingParams(7))
        tiny.deliver(poisoned, 0, poison, KEPT)
        every = [tiny.ask(str(n), [Text((10, 11, 12, 13, 14)[: n + 2])], SamplingParams(9)) for n in range(3)]
        tiny.drain()
        for n, asked in enumerate(every):
            assert asked.answer == greedy_answer(models, [Text((10, 11, 12, 13, 14)[: n + 2])], 9)
    assert all(torch.isfinite(torch.stack(tiny.runner.logits[str(n)])).all() for n in range(3))


# --- statistics -----------------------------------------------------------------------------------------------------


def timed(act: Callable[[], object]) -> tuple[int, int]:
    """When the call began and ended."""
    before_ns = monotonic_ns()
    act()
    return before_ns, monotonic_ns()


def test_stats_say_since_when_the_longest_standing_request_of_each_queue_has_its_status(models: Models) -> None:
    tiny = TinyEngine(models.engine, max_num_seqs=1)
    stats = tiny.engine.stats()
    assert (stats.running_since_ns, stats.waiting_since_ns, stats.awaiting_media_since_ns) == (None, None, None)
    about = tiny.ask("about a video", ABOUT_VIDEO, SamplingParams(1))
    first, _ = (
        timed(lambda name=name: tiny.ask(name, PROMPT, SamplingParams(4), [SamplingParams(4)]))  # type: ignore[misc]
        for name in ("first", "second")
    )
    stats = tiny.engine.stats()
    assert (stats.running, stats.waiting, stats.awaiting_media, stats.awaiting_sibling) == (0, 2, 1, 2)
    assert stats.awaiting_media_since_ns is not None
    assert stats.awaiting_media_since_ns < first[0]
    assert stats.waiting_since_ns is not None
    assert first[0] < stats.waiting_since_ns < first[1]
    stepped = timed(tiny.engine.step)
    stats = tiny.engine.stats()
    assert stats.running == 1
    assert stats.running_since_ns is not None
    assert stepped[0] < stats.running_since_ns < stepped[1]
    tiny.deliver(about, 0, VIDEO, KEPT)
    tiny.drain()
    stats = tiny.engine.stats()
    assert (stats.running_since_ns, stats.waiting_since_ns, stats.awaiting_media_since_ns) == (None, None, None)


def test_a_step_reports_its_tokens_of_prompts_and_of_answers(models: Models) -> None:
    steps: list[Step] = []
    tiny = TinyEngine(models.engine, max_num_batched_tokens=4, on_step=steps.append)
    tiny.ask("text", PROMPT, SamplingParams(3))
    start_ns = monotonic_ns()
    tiny.drain()
    # 4 and 1 tokens of the prompt, then two of the answer, whose last token is never computed.
    assert [(step.sequences, step.prompt_tokens, step.answer_tokens) for step in steps] == [
        (1, 4, 0),
        (1, 1, 0),
        (1, 0, 1),
        (1, 0, 1),
    ]
    assert all(step.seconds > 0 for step in steps)
    assert sum(step.seconds for step in steps) < (monotonic_ns() - start_ns) * 1e-9


def test_steps_add_up_to_the_totals(models: Models) -> None:
    """With draft tokens and preemption."""
    steps: list[Step] = []
    tiny = TinyEngine(models.engine, blocks=10, max_draft_tokens=3, on_step=steps.append)
    again = [Text((10, 11, 12, 10, 11, 12, 10, 11))]
    asked = [tiny.ask(str(number), again, SamplingParams(24)) for number in range(3)]
    tiny.drain()
    assert all(each.finished for each in asked)
    stats = tiny.engine.stats()
    assert sum(step.preemptions for step in steps) == stats.totals.preemptions > 0
    assert sum(step.draft_tokens for step in steps) == stats.totals.draft_tokens > 0
    assert sum(step.accepted_draft_tokens for step in steps) == stats.totals.accepted_draft_tokens
    assert sum(step.prompt_tokens + step.answer_tokens for step in steps) == stats.totals.tokens
    assert len(steps) == len(tiny.runner.steps)
