"""With --deterministic an answer has the same bits whatever is computed with it, before it, and in whichever chunks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from gridsieve.common.adapter_folder import AdapterFolder
from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.services.generation.loading import load_language_model
from gridsieve.services.generation.loading.mtp import load_mtp
from gridsieve.services.generation.model.attention.flash_infer import FlashInferCache
from gridsieve.services.generation.model.determinism import CPU_ROWS, made_deterministic
from gridsieve.services.generation.model.experts import EXPERT_ROWS, by_expert
from gridsieve.services.generation.model.runner import Runner
from gridsieve.services.generation.sampling.sampler import SamplingParams, SamplingState, choose
from gridsieve.services.generation.settings import GenerationSettings
from gridsieve.services.generation.startup.adapters import load_adapters
from gridsieve.services.generation.startup.build import build
from gridsieve.services.generation.startup.same_bits import use_equal_sizes
from tests.adapters import write_adapter
from tests.drafts import write_mtp
from tests.generation.paged_kernels import FakeFlashInfer, Kernels
from tests.law import Question, answer, assert_law
from tests.oracle import Text
from tests.tiny import BLOCK_TOKENS, Models, TinyEngine, load_models, random_item

# Dense, with levels that are added to rows; a mixture; recurrent states of both kinds, the second with a mixture.
KINDS = ["qwen3_vl", "qwen3_vl_moe", "qwen3_5", pytest.param("nemotron_h_omni", marks=pytest.mark.deep)]
# Five engines, each asked eight times. sizes: forwards have all sizes that agree here. tight: the question is admitted
# beside the others, its whole answer is not.
ENGINES: list[Mapping[str, Any]] = [
    {"max_num_batched_tokens": 5, "overlap": True},
    {"max_num_batched_tokens": 512, "snapshots": 0},
    {"max_num_batched_tokens": 16, "max_draft_tokens": 3, "sizes": True},
    {"max_num_batched_tokens": 9, "max_draft_tokens": 2, "head": True},
    {"tight": True},
]


@pytest.fixture(scope="module", params=KINDS)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Models:
    torch.set_num_threads(1)
    return load_models(request.param, tmp_path_factory.mktemp(request.param))


def deterministic(models: Models, dtype: torch.dtype = torch.float32) -> Models:
    """With weights of its own: the others stay as they are."""
    model = load_language_model(Checkpoint(models.folder), dtype, torch.device("cpu"))
    return replace(models, engine=made_deterministic(model))


def question_of(models: Models) -> Question:
    """It repeats itself, so that prompt lookup finds drafts."""
    video = random_item(models.family, (4, 2, 2), Fraction(1), rate=0.5)
    picture = random_item(models.family, (1, 2, 2), None, seed=6)
    return Question((Text((30, 31, 32, 33) * 3), video, Text((32,)), picture, Text((30, 31, 32))), 6, kept_seed=1)


def others_of(models: Models) -> list[Question]:
    return [Question((Text(tuple(range(40 + n, 50 + 5 * n))),), 10) for n in range(2)]


def answers(models: Models, head: Any = None) -> Iterator[tuple[TinyEngine, Tensor]]:
    """The logits of each token of forty answers: of each engine alone; again; and six beside others and one another."""
    question = question_of(models)
    together = [replace(question, answers=count) for count in (1, 1, 2, 1, 3, 1)]
    for settings in ENGINES:
        named = {"blocks": 64, **settings}
        all_sizes = named.pop("sizes", False) and models.engine.deterministic
        if named.pop("tight", False):  # three and four blocks of the others, and one more for each
            named["blocks"] = 9 + -(-question.prompt_tokens // BLOCK_TOKENS)
        engine = TinyEngine(replace(models.engine, draft=head if named.pop("head", False) else None), **named)
        if all_sizes:
            use_equal_sizes(engine.runner, named["blocks"], BLOCK_TOKENS)
        for others, questions in (([], [question]), ([], [question]), (others_of(models), together)):
            asked = answer(engine, [*others, *questions], arrivals=range(len(others) + len(questions)))
            for each in asked[len(others) :]:
                yield engine, torch.stack(engine.runner.logits[each.request.id])


def test_one_question_under_forty_conditions_has_one_answer_to_the_last_bit(models: Models) -> None:
    made = deterministic(models)
    head = None
    if models.family.model_type == "qwen3_5":
        head = load_mtp(Checkpoint(write_mtp(models.folder)), made.engine)
    engines, found = zip(*answers(made, head), strict=True)
    assert len(found) == 40
    assert [number for number, each in enumerate(found) if not torch.equal(each, found[0])] == []
    totals = sum((each.totals for each in engines[::8]), Counter[str]())
    assert totals["preemptions"] > 0
    assert totals["draft_tokens"] > 0


def test_without_the_flag_the_bits_differ(models: Models) -> None:
    found = answers(models)
    _, first = next(found)
    assert any(not torch.equal(each, first) for _, each in found)


@pytest.mark.deep
def test_in_bfloat16_they_are_the_same_too(models: Models) -> None:
    _, found = zip(*answers(deterministic(models, torch.bfloat16)), strict=True)
    assert all(torch.equal(each, found[0]) for each in found)


def test_the_law_holds_in_steps_that_are_divided_into_forwards(models: Models) -> None:
    """The first step has more rows than one forward, which cuts the question's chunk."""
    engine = TinyEngine(deterministic(models).engine, max_num_batched_tokens=512)
    questions = [Question((Text(tuple(range(100, 140))),), 3), question_of(models)]
    found = answer(engine, questions)
    assert sum(end - start for _, start, end in engine.runner.steps[0]) > CPU_ROWS[0]
    assert_law(models, engine, questions, found)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Models:
    torch.set_num_threads(1)
    return load_models("qwen2_5_vl", tmp_path_factory.mktemp("dense"))


def test_an_answer_with_an_adapter_is_the_same_beside_others_with_and_without(dense: Models, tmp_path: Path) -> None:
    write_adapter(dense.reference.model.language_model, tmp_path / "lora", r=3, target_modules=["q_proj", "v_proj"])
    made = deterministic(dense).engine
    load_adapters([AdapterFolder("lora", tmp_path / "lora")], made)
    question = replace(question_of(dense), adapter="lora")
    among = [replace(each, adapter=name) for each, name in zip(others_of(dense), ("lora", None), strict=True)]
    found = []
    for questions in ([question], [*among, question]):
        engine = TinyEngine(made, max_num_batched_tokens=13)
        asked = answer(engine, questions)
        found.append(torch.stack(engine.runner.logits[asked[-1].request.id]))
    assert torch.equal(*found)


def test_flash_infer_is_given_rows_of_their_own_and_splits_no_context(dense: Models) -> None:
    engine, library = TinyEngine(deterministic(dense).engine, max_num_batched_tokens=11), FakeFlashInfer()
    sizes, like = engine.runner._cache.sizes, engine.model.embed_tokens.weight
    engine.runner._cache = FlashInferCache(sizes, like, Kernels(sizes, like, library))
    questions = [*others_of(dense), question_of(dense)]
    assert_law(dense, engine, questions, answer(engine, questions))
    planned = library.made[-1]._kernel._blocks
    assert set(planned.row_ends[1:] - planned.row_ends[:-1]) == {1}
    assert len(planned.row_ends) == 1 + CPU_ROWS[0]
    assert library.made[-1].options["disable_split_kv"]


def test_an_expert_always_computes_as_many_rows() -> None:
    draw = torch.Generator().manual_seed(0)
    layers = {number: torch.randn(4, 4, generator=draw) for number in range(3)}
    counts = list[int]()

    def compute(number: int, rows: Tensor) -> Tensor:
        counts.append(len(rows))
        return rows @ layers[number]

    rows, weights = torch.randn(20, 4, generator=draw), torch.rand(20, 2, generator=draw)
    experts = torch.stack([torch.zeros(20, dtype=torch.int64), torch.arange(20) % 2 + 1], dim=1)
    own = {number: lambda part, number=number: compute(number, part) for number in layers}
    found = by_expert(own, rows, experts, weights, 3, fixed=True)
    assert set(counts) == {EXPERT_ROWS}
    each = torch.stack([rows @ layers[number] for number in layers])
    expected = sum(each[experts[:, place], torch.arange(20)] * weights[:, place, None] for place in range(2))
    torch.testing.assert_close(found, expected)


def test_log_probabilities_do_not_depend_on_the_other_rows_that_are_sampled() -> None:
    logits = 4 * torch.randn(9, 1003, generator=torch.Generator().manual_seed(0))

    def sampled(rows: Tensor) -> list[Any]:
        params = [SamplingParams(1, temperature=0.7, top_p=0.9, logprobs=True, top_logprobs=5) for _ in rows]
        return choose(rows, [SamplingState(each, torch.zeros(1, dtype=torch.int32).numpy()) for each in params]).read()

    assert sampled(logits) == [sampled(each[None])[0] for each in logits]


# --- what is tried at the start ---------------------------------------------------------------------------------------


class Wrong(nn.Module):
    """An output layer whose results depend on a row's place, or on the number of rows."""

    def __init__(self, right: nn.Module, by: str) -> None:
        super().__init__()
        self.right, self.by = right, by

    def forward(self, rows: Tensor) -> Tensor:
        wrong = torch.arange(len(rows))[:, None] if self.by == "place" else torch.tensor(len(rows))
        found: Tensor = self.right(rows) + 1e-3 * wrong
        return found


def runner_of(dense: Models, by: str = "") -> Runner:
    model = deterministic(dense).engine
    return Runner(replace(model, lm_head=Wrong(model.lm_head, by)) if by else model, 32, BLOCK_TOKENS)


def test_sizes_of_forwards_in_which_rows_have_other_bits_are_not_used(dense: Models) -> None:
    runner = runner_of(dense, by="number")
    use_equal_sizes(runner, 32, BLOCK_TOKENS)
    assert runner.row_sizes == CPU_ROWS[:1]


def test_a_machine_on_which_a_rows_place_decides_is_refused(dense: Models) -> None:
    with pytest.raises(StartupError, match=r"--deterministic: on cpu with --threads 1, .* its place among the 64"):
        use_equal_sizes(runner_of(dense, by="place"), 32, BLOCK_TOKENS)


def test_the_service_tries_it_and_compiles_nothing(dense: Models) -> None:
    flags = ["--model", str(dense.folder), "--device", "cpu", "--kv-cache-tokens", "1024", "--dtype", "float32"]
    settings = GenerationSettings.load([*flags, "--deterministic"])
    with patch.object(Runner, "compile", side_effect=AssertionError):
        runner = build(settings, Checkpoint(dense.folder)).runner
    assert runner.row_sizes[0] == CPU_ROWS[0]
    assert runner.model.deterministic


@pytest.mark.parametrize("other", [("--tensor-parallel", "3"), ("--compile", "on")])
def test_what_would_change_the_order_of_sums_is_refused(other: tuple[str, str]) -> None:
    with pytest.raises(StartupError, match=f"--deterministic .*{other[0]}"):
        GenerationSettings.load(["--deterministic", *other])
