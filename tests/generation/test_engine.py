"""An engine a step at a time: what goes out as events, what it refuses, and what a cancellation or a failure costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from common.contract.errors import InvalidRequest, Overloaded, PeerContract, PromptTooLong
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
    """Its blocks are all free again when a test is done with it."""
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
    asked.request.detokenizer = StopsAtThird(stops)
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
    tiny = TinyEngine(models.engine, blocks=6, max_num_batched_tokens=3)
    every = [tiny.ask(name, PROMPT, params) for name in "abc"]
    tiny.drain()
    assert tiny.engine.stats().totals.preemptions > 0
    assert [asked.answer for asked in every] == [expected.answer] * 3


# --- devices --------------------------------------------------------------------------------------------------------


def test_delivered_embeddings_are_sent_to_the_device_and_an_answers_last_rows_stay_on_the_host(
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


def test_last_rows_are_sent_to_the_device_with_the_step_that_reads_them(
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
    assert sent == [(1, 1, 64)]  # 3 tokens of text and 6 of media: two blocks are known, one row stands behind them


# --- limits ---------------------------------------------------------------------------------------------------------


def test_a_sequence_that_can_never_fit_is_refused(models: Models) -> None:
    tiny = TinyEngine(models.engine, blocks=3)
    tokens = 3 * BLOCK_TOKENS
    fits = tokens + 1 - len(PROMPT[0].ids)  # the last token of an answer needs no room
    with pytest.raises(PromptTooLong, match=f"need room for {tokens + 1} tokens, the cache holds {tokens}"):
        tiny.ask("a", PROMPT, SamplingParams(fits + 1))
    asked = tiny.ask("b", PROMPT, SamplingParams(fits))
    tiny.drain()
    assert asked.finished == Finished(FinishReason.LENGTH, fits)


def test_a_full_queue_refuses_until_somebody_leaves(models: Models) -> None:
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


def test_more_answers_than_may_ever_run_and_wait_are_refused_for_good(models: Models) -> None:
    tiny = TinyEngine(models.engine, max_num_seqs=1, max_waiting=2)
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
def test_a_device_without_memory_is_a_full_one(tiny: TinyEngine, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """It costs the requests of its step, or the one whose media came, and no other."""

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
