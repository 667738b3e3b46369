"""The engine step by step: events, statistics, limits, cancellation and failures."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from common.contract.errors import FramesieveError, InvalidRequest, Overloaded, PeerContract, PromptTooLong
from services.generation.engine.stats import Step
from services.generation.request.encoded_media import MediaItem
from services.generation.request.request import Finished, FinishReason, PrefillStarted, Tokens
from services.generation.sampling.sampler import SamplingParams
from tests.generation.engine_questions import ABOUT_VIDEO, KEPT, PROMPT, VIDEO, greedy_answer
from tests.oracle import Item, Text
from tests.tiny import BLOCK_TOKENS, Models, TinyEngine


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
    with pytest.raises(InvalidRequest, match=r"sampling\.n must be at most 2 here.*got 3"):
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
    tiny.engine.deliver(asked.request, MediaItem(0, np.array(KEPT, np.int32), torch.zeros(1, 5, 64), 0, bytes(32)))
    tiny.drain()
    assert asked.failed
    with pytest.raises(PeerContract, match=r"are \[1, 5, 64\], not \[1, 6, 64\]"):
        raise asked.failed.error
    assert neighbour.finished


@pytest.mark.parametrize(
    ("fault", "kind"),
    [(RuntimeError("the device caught fire"), FramesieveError), (torch.OutOfMemoryError("fire"), Overloaded)],
)
def test_a_failing_forward_fails_only_the_requests_of_its_step(
    tiny: TinyEngine, monkeypatch: pytest.MonkeyPatch, fault: Exception, kind: type[FramesieveError]
) -> None:
    asked = tiny.ask("a", PROMPT, SamplingParams(5))
    later = tiny.ask("b", ABOUT_VIDEO, SamplingParams(5))
    tiny.engine.step()
    with monkeypatch.context() as patched:
        patched.setattr(tiny.runner, "run", Mock(side_effect=fault))
        tiny.engine.step()
    assert asked.failed
    assert type(asked.failed.error) is kind
    assert "fire" not in str(asked.failed.error)
    tiny.deliver(later, 0, VIDEO, KEPT)
    tiny.drain()
    assert later.finished == Finished(FinishReason.LENGTH, 5)


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


def test_steps_add_up_to_the_totals(models: Models) -> None:
    """With draft tokens and preemption."""
    steps: list[Step] = []
    tiny = TinyEngine(models.engine, blocks=10, max_draft_tokens=3, on_step=steps.append)
    for name in "abc":
        tiny.ask(name, [Text((10, 11, 12, 10, 11, 12, 10, 11))], SamplingParams(24))
    tiny.drain()
    stats = tiny.engine.stats()
    assert sum(step.preemptions for step in steps) == stats.totals.preemptions > 0
    assert sum(step.draft_tokens for step in steps) == stats.totals.draft_tokens > 0
    assert sum(step.accepted_draft_tokens for step in steps) == stats.totals.accepted_draft_tokens
    assert sum(step.prompt_tokens + step.answer_tokens for step in steps) == stats.totals.tokens
