"""A step that lacks memory leaves nothing behind: whichever of its operations fails, no answer changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.services.generation.loading.draft_head import load_draft_head
from gridsieve.services.generation.request.request import Request
from gridsieve.services.generation.sampling.sampler import SamplingParams
from gridsieve.services.generation.sampling.structured import Grammars
from tests.drafts import SPECFORGE, write_head
from tests.oracle import Text
from tests.tiny import Asked, Models, TinyEngine, load_models

END = 9
PROMPTS = [Text(tuple(range(10 + 3 * number, 15 + 7 * number))) for number in range(3)]
RULED = SamplingParams(
    14, temperature=0.7, repetition_penalty=1.1, frequency_penalty=0.4, seed=5, logprobs=True, top_logprobs=2
)


class LacksMemory(TorchDispatchMode):
    """Counts operations that make tensors, and fails the one of this number."""

    def __init__(self, number: int | None) -> None:
        super().__init__()
        self.number, self.seen = number, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(each.type, torch.TensorType) and each.alias_info is None for each in func._schema.returns):
            self.seen += 1
            if self.seen - 1 == self.number:
                raise torch.OutOfMemoryError("a test")
        return func(*args, **(kwargs or {}))


class Foretold:
    """Implements `Drafts`: what the answer will be, with a wrong last token in every third step."""

    def __init__(self, answers: Mapping[str, Sequence[int]]) -> None:
        self._answers, self._steps = answers, 0

    def begin_step(self, sequences: int) -> None:
        self._steps += 1

    def propose(self, limits: Mapping[Request, int]) -> dict[Request, tuple[int, ...]]:
        found = dict[Request, tuple[int, ...]]()
        for request, limit in limits.items():
            said = len(request.output_ids)
            right = self._answers[request.id][said : said + limit]
            found[request] = (*right[:-1], 100) if self._steps % 3 == 0 and right else (*right,)
        return found


@pytest.fixture(scope="module", params=["qwen2_5_vl", pytest.param("qwen3_5", marks=pytest.mark.deep)])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Without recurrent states and with them."""
    torch.set_num_threads(1)
    return load_models(request.param, tmp_path_factory.mktemp("failed"))


@pytest.fixture(scope="module")
def wishes(models: Models) -> list[SamplingParams]:
    grammars = Grammars(models.folder, models.engine.vocab_size, [END])
    text = '{"type": "string", "minLength": 50}'
    ruled = replace(RULED, bad_words=((11, 12),), min_new_tokens=3, logit_bias=((30, 1.5), (31, -100)))
    json = replace(RULED, grammar=grammars.compile(text), eos_ids=(END,), seed=3)
    return [ruled, json, SamplingParams(14, temperature=1.0, seed=2)]


def answers(
    tiny: TinyEngine, wishes: Sequence[SamplingParams], failing: Iterator[int] | None
) -> tuple[list[Asked], int]:
    """The answers, and the most operations in a step in which all decode. failing: the operation that fails in each
    step of several requests."""
    asked = [tiny.ask(str(number), [PROMPTS[number]], wish) for number, wish in enumerate(wishes)]
    most, ran = 0, True
    while ran:
        several, decoding = sum(not each.finished for each in asked) > 1, all(each.answer for each in asked)
        with LacksMemory(next(failing) if failing and several else None) as memory:
            ran = tiny.engine.step()
        tiny.engine.check_integrity()
        most = max(most, memory.seen * decoding)
    assert tiny.engine.stats().blocks_used == 0
    return asked, most


@pytest.mark.parametrize("stride", [29, pytest.param(1, marks=[pytest.mark.deep, pytest.mark.timeout(3600)])])
@pytest.mark.parametrize("how", ["drafts", "head", "overlap"])
def test_whatever_fails_in_a_step_changes_no_answer(
    models: Models, wishes: list[SamplingParams], how: str, stride: int
) -> None:
    """Of drafts, of a head that drafts, and of sampling while the next step is launched."""
    model = models.engine
    expected, most = answers(TinyEngine(model), wishes, None)
    if how == "head":
        folder = models.folder / "head"
        if not folder.exists():
            write_head(folder, SPECFORGE, model.hidden_size, model.vocab_size)
        model = replace(model, draft=load_draft_head(Checkpoint(folder), model))
    numbers = count(0, stride)
    while next(numbers) < most:
        tiny = TinyEngine(model, max_draft_tokens=3 * (how != "overlap"), overlap=how == "overlap")
        if how == "drafts":
            tiny.engine._scheduler._drafts = Foretold({each.request.id: each.answer for each in expected})
        found, now = answers(tiny, wishes, numbers)
        most = max(most, now)
        for one, other in zip(found, expected, strict=True):
            assert one.finished, one.failed
            assert one.answer == other.answer
            assert logprobs(one) == pytest.approx(logprobs(other), abs=1e-4)
        if how == "drafts":
            assert all(each.finished and each.finished.accepted_draft_tokens for each in found)


def logprobs(asked: Asked) -> list[float]:
    return [value for event in asked.events for value in getattr(event, "logprobs", ())]
