"""With overlap, answers are those without it, though a step is launched before the tokens of the last one are known.

The device is a fake: results are garbage until they are waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gridsieve.services.generation.engine.speculation import PromptLookup
from gridsieve.services.generation.engine.stats import Step
from gridsieve.services.generation.model.runner import LaunchedStep, Runner
from gridsieve.services.generation.request.request import Failed, FinishReason, Request
from gridsieve.services.generation.sampling import sampler
from gridsieve.services.generation.sampling.sampler import SamplingParams
from tests.generation.paged_kernels import use_paged
from tests.generation.recorder import Recorder
from tests.oracle import Text
from tests.tiny import Asked, Models, TinyEngine

PROMPTS = [Text(tuple(range(10 + 3 * number, 14 + 7 * number))) for number in range(4)]


class LateCopies:
    """Takes the place of `ToHost`. A copy has its values only when it is waited for."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._copies = tuple(torch.full_like(each, 99) for each in tensors)
        self._arriving = [each.clone() for each in tensors]

    @torch.inference_mode()
    def wait(self) -> tuple[Tensor, ...]:
        for copy, tensor in zip(self._copies, self._arriving, strict=True):
            copy.copy_(tensor)
        return self._copies


def asked_of(
    models: Models, wishes: Sequence[SamplingParams], overlap: bool, **sizes: Any
) -> tuple[list[Asked], TinyEngine]:
    """Answers to PROMPTS, each asked two steps after the one before."""
    tiny = TinyEngine(models.engine, overlap=overlap, **sizes)
    asked = []
    with pytest.MonkeyPatch.context() as patched:
        if overlap:
            patched.setattr(sampler, "ToHost", LateCopies)
        for number, (prompt, wish) in enumerate(zip(PROMPTS, wishes, strict=True)):
            asked.append(tiny.ask(str(number), [prompt], wish))
            tiny.engine.step()
            tiny.engine.check_integrity()
            tiny.engine.step()
        tiny.drain()
    tiny.engine.check_integrity()
    assert tiny.engine.stats().blocks_used == 0
    return asked


def told(asked: Sequence[Asked]) -> list[tuple[list[int], Any]]:
    """Tokens and why each ended."""
    return [(each.answer, each.finished) for each in asked]


def tops(asked: Asked) -> list[list[list[int]]]:
    """The most likely tokens at each token, by event."""
    return [[[token for token, _ in each] for each in getattr(event, "top_logprobs", ())] for event in asked.events]


wishes = st.builds(
    SamplingParams,
    st.integers(1, 12),
    temperature=st.sampled_from([0.0, 1.0]),
    top_p=st.sampled_from([1.0, 0.8]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.9]),
    seed=st.integers(0, 9),
    logprobs=st.booleans(),
    top_logprobs=st.integers(0, 3),
    min_new_tokens=st.integers(0, 6),
)


@settings(max_examples=10, deadline=None)
@given(st.lists(wishes, min_size=4, max_size=4), st.data())
def test_answers_are_those_without_overlap(models: Models, wishes: list[SamplingParams], data: st.DataObject) -> None:
    """In a cache that may be too small for all, with answers that a token or a stop string ends early, and with words
    of two tokens of the answer that it must not contain."""
    sizes = {
        "blocks": data.draw(st.sampled_from([11, 13, 64])),
        "max_num_batched_tokens": data.draw(st.sampled_from([3, 16, 64])),
        "max_num_seqs": data.draw(st.sampled_from([2, 4])),
        "max_draft_tokens": data.draw(st.sampled_from([0, 2])),
    }
    plain = asked_of(models, wishes, False, **sizes)
    ends = [data.draw(st.sampled_from([*each.answer, 0])) for each in plain]
    by_text = data.draw(st.lists(st.booleans(), min_size=4, max_size=4))
    words = [data.draw(st.lists(st.sampled_from([*pairwise(each.answer), (0, 0)]), max_size=3)) for each in plain]
    wishes = [
        replace(wish, bad_words=tuple(bad), **({"stop": (str(end),)} if as_text else {"eos_ids": (end,)}))
        for wish, end, as_text, bad in zip(wishes, ends, by_text, words, strict=True)
    ]
    without = asked_of(models, wishes, False, **sizes)
    found = asked_of(models, wishes, True, **sizes)
    assert told(found) == told(without)
    for each, bad in zip(found, words, strict=True):
        assert not set(bad) & set(pairwise(each.answer))
    assert [tops(each) for each in found] == [tops(each) for each in without]


def test_a_step_is_launched_before_the_last_one_is_read(models: Models) -> None:
    """So an answer that ends by a token is computed once too often, and one that ends by length is not."""
    wish = SamplingParams(6)
    answer = asked_of(models, [wish] * 4, False)[0].answer
    for params, kept in ((wish, 6), (replace(wish, eos_ids=(answer[3],)), answer.index(answer[3]) + 1)):
        tiny = TinyEngine(models.engine, overlap=True)
        asked = tiny.ask("0", [PROMPTS[0]], params)
        assert tiny.engine.step()
        assert not asked.answer, "the first step is not read before the second is launched"
        tiny.drain()
        assert asked.answer == answer[:kept]
        assert len(tiny.runner.steps) == kept + (params is not wish)


AT = (3, 4, 9, 10)


@dataclass
class Sometimes(PromptLookup):
    """Drafts what follows these numbers of tokens of an answer."""

    answer: Sequence[int]

    def propose(self, limits: Mapping[Request, int]) -> dict[Request, tuple[int, ...]]:
        said = {each: len(each.output_ids) for each in limits}
        return {each: tuple(self.answer[said[each] :][:limit]) for each, limit in limits.items() if said[each] in AT}


def test_a_step_is_read_at_once_where_drafts_are_foreseen_and_where_it_has_them(models: Models) -> None:
    wish = SamplingParams(12)
    answer = asked_of(models, [wish] * 4, False)[0].answer
    tiny = TinyEngine(models.engine, overlap=True, max_draft_tokens=2)
    tiny.engine._scheduler._drafts = Sometimes(answer)
    asked, known = tiny.ask("0", [PROMPTS[0]], wish), list[int]()
    while tiny.engine.step():
        known.append(len(asked.answer))
    assert asked.answer == answer
    # The fourth step is read with the one before it, and so is the eighth. The steps after them have right drafts, two
    # and one.
    assert known == [0, 1, 2, 4, 7, 7, 8, 10, 12]


def test_replayed_rows_take_tokens_on_the_device(models: Models) -> None:
    wishes, steps = [SamplingParams(9, repetition_penalty=1.2, seed=4)] * 4, list[Step]()
    without = asked_of(models, wishes, False)
    tiny = TinyEngine(models.engine, overlap=True, max_num_batched_tokens=8, on_step=steps.append)
    use_paged(tiny).runner.capture_decoding(4, 64, Recorder())
    asked = [tiny.ask(str(number), [PROMPTS[number]], wish) for number, wish in enumerate(wishes)]
    tiny.drain()
    assert told(asked) == told(without)
    assert sum(step.replayed for step in steps) == 8


def failing_in(owner: type, name: str) -> Callable[[Request, pytest.MonkeyPatch], None]:
    """Makes a method fail where the request is in its step."""

    def fail(request: Request, patched: pytest.MonkeyPatch) -> None:
        work = getattr(owner, name)

        def failing(self: Any, *args: Any) -> Any:
            chunks = self.chunks if isinstance(self, LaunchedStep) else args[0]
            if any(chunk.request is request for chunk in chunks):
                raise ValueError("broken")
            return work(self, *args)

        patched.setattr(owner, name, failing)

    return fail


def refuse_tokens(request: Request, patched: pytest.MonkeyPatch) -> None:
    patched.setattr(request.sampling_state, "accept_token", Mock(side_effect=ValueError("refused")))


@pytest.mark.parametrize(
    ("fail", "sizes"),
    [
        (failing_in(Runner, "forward"), {"overlap": True}),
        (failing_in(LaunchedStep, "sample"), {"overlap": True}),
        (refuse_tokens, {"overlap": True}),
        (refuse_tokens, {"overlap": True, "max_draft_tokens": 2}),
    ],
    ids=["forward", "sample", "token", "draft"],
)
def test_what_fails_in_a_step_costs_its_own_request_only(
    models: Models, monkeypatch: pytest.MonkeyPatch, fail: Callable[..., None], sizes: dict[str, Any]
) -> None:
    wishes = [SamplingParams(8, temperature=1.0, repetition_penalty=1.2, seed=seed) for seed in range(4)]
    without = asked_of(models, wishes, False)
    tiny = TinyEngine(models.engine, **sizes)
    asked = [tiny.ask(str(number), [PROMPTS[number]], wish) for number, wish in enumerate(wishes)]
    tiny.engine.step()
    fail(asked[2].request, monkeypatch)
    tiny.drain()
    assert isinstance(asked[2].events[-1], Failed)
    others = (0, 1, 3)
    assert told([asked[number] for number in others]) == told([without[number] for number in others])
    assert tiny.engine.stats().blocks_used == 0


def test_an_answer_that_has_ended_does_not_fail_with_the_step_too_many(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = asked_of(models, [SamplingParams(8)] * 4, False)[0].answer
    tiny = TinyEngine(models.engine, overlap=True)
    ended = answer.index(answer[3])
    asked = tiny.ask("0", [PROMPTS[0]], SamplingParams(8, eos_ids=(answer[3],)))
    launch = Runner.launch

    def failing(self: Runner, *args: Any) -> LaunchedStep:
        if len(tiny.runner.steps) > ended + 1:
            raise ValueError("no memory")
        return launch(self, *args)

    monkeypatch.setattr(Runner, "launch", failing)
    tiny.drain()
    assert asked.answer == answer[: ended + 1]
    assert asked.finished
    assert not asked.failed


def test_a_request_cancelled_while_its_token_is_computed_gets_nothing_more(models: Models) -> None:
    tiny = TinyEngine(models.engine, overlap=True)
    asked, other = (tiny.ask(str(number), [PROMPTS[number]], SamplingParams(6)) for number in (0, 1))
    tiny.engine.step()
    tiny.engine.step()
    before = len(asked.events)
    tiny.engine.cancel(asked.request)
    tiny.drain()
    assert len(asked.events) == before
    assert other.finished
    assert other.finished.reason is FinishReason.LENGTH
    assert tiny.engine.stats().blocks_used == 0
