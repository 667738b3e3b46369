"""The engine over FlashInfer's kernels obeys the law, with heads of a size that FlashInfer has.

Prompts come in chunks, beside rows that decode, and again with the same beginning; rows decode as replayed graphs, with
and without drafts. The
reference is one forward in float32 on the CPU.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.services.compute.graphs import CudaCapture
from gridsieve.services.generation.loading import load_language_model
from gridsieve.services.generation.model.attention.flash_infer import FlashInferCache
from gridsieve.services.generation.model.fused_layers import RotaryTable
from tests.families import FAMILIES, write_qwen3_vl_heads
from tests.law import Question, answer, assert_law
from tests.oracle import Text
from tests.tiny import Models, TinyEngine, load_models, random_item

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
    pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="FlashInfer is not installed"),
]

CUDA = torch.device("cuda", 0)
FAMILY = "qwen3_vl"
# Of log-probabilities. Plain kernels on a CPU are 0.06 off in bfloat16, and 0.19 with keys and values in fp8.
TOLERANCE, FP8_TOLERANCE = 0.15, 0.4
# Query heads, KV heads and their size, of which `make gpu-bundle` has kernels: decoding without tensor cores, and with.
HEADS = [(4, 2, 128), (28, 4, 128)]


@pytest.fixture(scope="module", params=HEADS, ids=str)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Models:
    return load_models(
        FAMILY,
        tmp_path_factory.mktemp("heads"),
        lambda folder, seed: write_qwen3_vl_heads(folder, seed, *request.param),
    )


def questions() -> list[Question]:
    """Prompts of many lengths, with pruned videos and pictures; every other one begins like the one before."""
    asked = []
    for number in range(8):
        film = random_item(FAMILIES[FAMILY], (4, 2, 3), Fraction(2, 3), seed=number // 2, rate=0.75)
        picture = random_item(FAMILIES[FAMILY], (1, 3, 2), None, seed=number // 2)
        opening = Text(tuple(range(10, 20 + 9 * (number // 2))))
        asked.append(Question((opening, film, Text((7, 8)), picture, Text((9, 10 + number))), new_tokens=8 + number))
    return asked


@pytest.mark.parametrize("fp8", [False, True], ids=["bfloat16", "fp8"])
@pytest.mark.parametrize(("chunk_tokens", "drafts"), [(5, 0), (64, 3)])
def test_the_law_holds_over_flash_infer(models: Models, chunk_tokens: int, drafts: int, fp8: bool) -> None:
    model = replace(load_language_model(Checkpoint(models.folder), torch.bfloat16, CUDA), fp8_cache=fp8)
    engine = TinyEngine(model, blocks=256, max_num_batched_tokens=chunk_tokens, overlap=True, max_draft_tokens=drafts)
    assert isinstance(engine.runner._cache, FlashInferCache), "the log says what does not work"
    assert isinstance(model.text.rotary_emb, RotaryTable), "the log says what does not work"
    assert engine.runner.capture_decoding(8, 512, CudaCapture(CUDA), drafts)
    asking = questions()
    asked = answer(engine, asking, arrivals=[0, 4, 1, 9, 2, 14, 30, 40], deliveries=[0, 3, 1, 4])
    assert max(each.request.cached_tokens for each in asked) > 0
    tolerance = FP8_TOLERANCE if fp8 else TOLERANCE
    assert_law(models, engine, asking, asked, tolerance, 2 * tolerance)
