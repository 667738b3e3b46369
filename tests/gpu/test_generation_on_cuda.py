"""The engine on a CUDA device: the law holds, no step synchronises with the device, and memory does not grow.

The law's tolerances are those of float32 in another order of additions, and of bfloat16, which a recurrent state adds
up, and in which a router of experts may choose another expert by a hair: on the CPU, bfloat16 is 0.1, 0.2 and 1 off.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.services.compute.graphs import CudaCapture
from gridsieve.services.generation.loading import load_language_model
from gridsieve.services.generation.model.runner import LaunchedStep, Runner, SampledStep
from gridsieve.services.generation.parallel.group import WorkerRanks
from gridsieve.services.generation.request.batch import Chunk
from gridsieve.services.generation.sampling.sampler import SamplingParams, SamplingState, choose
from gridsieve.services.generation.sampling.structured import ANY_OBJECT, Grammars
from gridsieve.services.generation.sampling.truncation import floors
from gridsieve.services.generation.settings import GenerationSettings
from gridsieve.services.generation.startup.build import BLOCK_TOKENS, build
from tests import parallel_rank
from tests.families import FAMILIES
from tests.generation.paged_kernels import read_in_place
from tests.gpu.waits import waits_forbidden
from tests.law import answer, assert_law, several_questions
from tests.oracle import Item, Text, kept_tokens
from tests.tiny import Models, TinyEngine, load_models, random_item

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")

CUDA = torch.device("cuda", 0)
MIB = 2**20
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.25}
RECURRENT_TOLERANCE, EXPERTS_TOLERANCE = 0.5, 2.0


@pytest.fixture(scope="module")
def models(family: str, tmp_path_factory: pytest.TempPathFactory) -> Models:
    return load_models(family, tmp_path_factory.mktemp("checkpoint"))


# Each pair of the three comes once.
@pytest.mark.parametrize(
    ("dtype", "chunk_tokens", "graphs"),
    [(torch.float32, 3, False), (torch.float32, 64, True), (torch.bfloat16, 3, True), (torch.bfloat16, 64, False)],
)
def test_the_law_holds(models: Models, family: str, dtype: torch.dtype, chunk_tokens: int, graphs: bool) -> None:
    model = load_language_model(Checkpoint(models.folder), dtype, CUDA)
    drafts = 2 if graphs else 0
    engine = TinyEngine(model, max_num_batched_tokens=chunk_tokens, overlap=True, max_draft_tokens=drafts)
    if graphs:
        read_in_place(engine.runner)
        assert engine.runner.capture_decoding(8, 256, CudaCapture(CUDA), drafts)
    asking = several_questions(FAMILIES[family])
    asked = answer(engine, asking, [0, 0, 1, 2, 5, 9], [0, 3, 1, 4])
    tolerance = TOLERANCES[dtype]
    if dtype is torch.bfloat16 and model.states is not None:
        tolerance = RECURRENT_TOLERANCE
    if dtype is torch.bfloat16 and ("moe" in family or family == "nemotron_h_omni"):
        tolerance = EXPERTS_TOLERANCE
    assert_law(models, engine, asking, asked, tolerance, 2 * tolerance)


@pytest.mark.parametrize("graphs", [False, True])
def test_no_step_synchronises_with_the_device(
    models: Models, family: str, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_language_model(Checkpoint(models.folder), torch.bfloat16, CUDA)
    engine = TinyEngine(model, max_num_batched_tokens=16, overlap=True)
    if graphs:
        read_in_place(engine.runner)
        assert engine.runner.capture_decoding(8, 256, CudaCapture(CUDA))
    answer(engine, several_questions(FAMILIES[family]))  # a first run, which allocates
    launch, sample, watched = Runner.launch, LaunchedStep.sample, []

    def launched(runner: Runner, chunks: Sequence[Chunk], before: SampledStep | None) -> LaunchedStep:
        watched.append(before is not None)
        with waits_forbidden():
            return launch(runner, chunks, before)

    def sampled(step: LaunchedStep) -> SampledStep:
        with waits_forbidden():
            return sample(step)

    monkeypatch.setattr(Runner, "launch", launched)
    monkeypatch.setattr(LaunchedStep, "sample", sampled)
    answer(engine, several_questions(FAMILIES[family]))
    assert {False, True} == set(watched)


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (20, 1.0), (20, 0.8), (0, 0.9), (2000, 1.0), (2000, 0.9)])
def test_tokens_are_chosen_without_a_wait_and_as_on_the_cpu(tiny_checkpoint: Path, top_k: int, top_p: float) -> None:
    how = SamplingParams(9, 0.7, top_p, top_k, 0.01, repetition_penalty=1.1, presence_penalty=0.5, logprobs=True)
    ruled = replace(how, min_new_tokens=3, eos_ids=(7,), logit_bias=((5, 1.5), (6, -100)), bad_words=((9, 11), (12,)))
    held = replace(how, grammar=Grammars(tiny_checkpoint, 4096, [2]).compile(ANY_OBJECT))
    each = (ruled, SamplingParams(9), replace(how, seed=3, top_logprobs=4), held)
    logits = torch.randn(4, 4096)
    found = []
    for device in (torch.device("cpu"), CUDA):
        first, states = ([SamplingState(one, np.arange(5, dtype=np.int32)) for one in each] for _ in range(2))
        choose(logits.to(device), first)  # a first run, which allocates
        with waits_forbidden():
            chosen = choose(logits.to(device, non_blocking=True), states)
        found.append([(token.token_id, [one for one, _ in token.top]) for token in chosen.read()])
    assert found[0] == found[1]


@pytest.mark.parametrize("rows", [1, 64])
def test_the_kernels_find_the_floors_of_a_ranking(rows: int) -> None:
    scores = torch.randn(rows, 152_064, generator=torch.Generator().manual_seed(rows)) * 2
    scores[::3] = (8 * scores[::3]).round() / 8  # with ties
    scores = (scores - scores.amax(dim=-1, keepdim=True)).to(CUDA)
    top_ks = [(0, 5000)[row % 2] for row in range(rows)]
    top_ps = [(0.8, 0.95, 1 - 1e-6)[row % 3] for row in range(rows)]
    for row, floor in enumerate(floors(scores, top_ks, top_ps)):
        ranked = scores[row].sort(descending=True).values
        ranked = ranked[ranked >= ranked[(top_ks[row] or len(ranked)) - 1]]
        held = ranked.exp().cumsum(0, dtype=torch.float64)
        assert floor == ranked[held >= top_ps[row] * held[-1]][0]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_5"], indirect=True)  # the latter has recurrent states
def test_five_hundred_requests_do_not_grow_memory(models: Models, family: str) -> None:
    engine = TinyEngine(
        load_language_model(Checkpoint(models.folder), torch.bfloat16, CUDA), blocks=256, max_waiting=64
    )
    read_in_place(engine.runner)
    engine.runner.capture_decoding(8, 256, CudaCapture(CUDA))

    def answer_fifty(first: int) -> tuple[int, int]:
        for number in range(first, first + 50):
            parts: list[Text | Item] = [Text(tuple(range(10, 12 + number % 40)))]
            film = random_item(FAMILIES[family], (1 + number % 5, 2, 3), Fraction(1), seed=number, rate=number % 4 / 4)
            if number % 2:
                parts += [film, Text((7, 8))]
            params = SamplingParams(2 + number % 12, temperature=number % 3 / 2, top_p=0.9, logprobs=number % 5 == 0)
            asked = engine.ask(str(number), parts, params)
            if number % 2:
                engine.deliver(asked, 0, film, kept_tokens(film, number))
            if number % 7 == 0:
                engine.engine.cancel(asked.request)
            engine.engine.step()
        engine.drain()
        engine.runner._logits.clear()
        engine.runner._requests.clear()
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    used = [answer_fifty(first) for first in range(0, 500, 50)]
    settled = used[1]
    assert all(abs(allocated - settled[0]) < MIB for allocated, _ in used[2:]), used
    assert all(reserved <= settled[1] + 64 * MIB for _, reserved in used[2:]), used


def test_the_kv_cache_fills_the_given_fraction_of_the_memory(tiny_checkpoint: Path) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(CUDA)
    fraction = round((total - free) / total + 0.1, 2)
    flags = ("--gpu-memory-fraction", str(fraction), "--device", "cuda:0")
    settings = GenerationSettings.load(["--model", str(tiny_checkpoint), "--max-model-len", "4096", *flags])
    built = build(settings, Checkpoint(tiny_checkpoint))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(CUDA)
    assert (total - free) / total <= fraction
    assert built.blocks * BLOCK_TOKENS * built.runner.model.token_bytes >= 0.05 * total


@pytest.fixture(scope="module")
def leading() -> Iterator[WorkerRanks]:
    if torch.cuda.device_count() < 2:
        pytest.skip("only one CUDA device on this machine")
    leading = WorkerRanks(2, ("cuda",), CUDA, parallel_rank.MODULE)
    yield leading
    leading.close()


def test_the_law_holds_on_two_cards(models: Models, family: str, leading: WorkerRanks) -> None:
    leading.ranks.broadcast(str(models.folder).encode())
    half = load_language_model(Checkpoint(models.folder), torch.float32, CUDA, leading.group)
    engine, asking = TinyEngine(half, workers=leading, max_num_batched_tokens=16), several_questions(FAMILIES[family])
    tolerance = TOLERANCES[torch.float32]
    assert_law(replace(models, engine=half), engine, asking, answer(engine, asking), tolerance, 2 * tolerance)
    leading.ranks.broadcast(b"")
