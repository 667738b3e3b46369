"""`make bench-ceiling`: a decode step of many sequences with a model that takes no time: the Python of a step.

Rows decode as on a card: scheduling, packing, the graph's inputs, sampling, events.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from benchmarks.prompts import submit, text_prompt
from benchmarks.report import run
from benchmarks.table import Row
from gridsieve.common.checkpoint import DEMO_MODEL, Checkpoint
from gridsieve.services.compute.graphs import Captured
from gridsieve.services.generation.engine.engine import Engine
from gridsieve.services.generation.loading import load_language_model
from gridsieve.services.generation.memory.blocks import BlockAllocator
from gridsieve.services.generation.model.attention.block_plan import BlockPlan
from gridsieve.services.generation.model.attention.flash_infer import FlashInferCache
from gridsieve.services.generation.model.runner import Runner
from gridsieve.services.generation.request.batch import Packed
from gridsieve.services.generation.request.request import Event
from gridsieve.services.generation.sampling.sampler import SamplingParams

SEQUENCES = (64, 256)
CONTEXT_TOKENS, STEPS, BLOCK_TOKENS = 2000, 200, 16
WARM_UP_STEPS = 64  # in which all prompts are computed
STEP_S = 1e-3
TOKEN = 300  # that every answer repeats


class Instant(Runner):
    """A runner whose model takes no time: decode steps fill the inputs of graphs, as on a card, and compute nothing."""

    def __init__(self, blocks: int, rows: int) -> None:
        model = load_language_model(Checkpoint(DEMO_MODEL), torch.float32, torch.device("cpu"))
        super().__init__(model, blocks, BLOCK_TOKENS)
        self._cache = FlashInferCache(self._cache.sizes, model.embed_tokens.weight, _NoKernels())
        self.capture_decoding(rows, BLOCK_TOKENS * blocks // rows, _nothing)

    def _forward(self, packed: Packed, ids: Tensor, media_embeds: Tensor | None, watched: object) -> Tensor:
        return _most_likely(torch.zeros(len(packed.logit_rows), self.model.vocab_size))


class _NoKernels:
    def prefill(self) -> _NoKernels:
        return self

    def decode(self, rows: int, max_blocks: int) -> _NoKernels:
        return self

    def verify(self, rows: int, most_rows: int, max_blocks: int) -> _NoKernels:
        return self

    def plan(self, blocks: BlockPlan) -> None:
        pass

    def run(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.zeros_like(query)


def _nothing(inputs: Sequence[Tensor], compute: Callable[[], Tensor]) -> Captured:
    """A captured graph that computes nothing."""
    return Captured(lambda: None, _most_likely(torch.zeros_like(compute())))


def _most_likely(logits: Tensor) -> Tensor:
    """TOKEN is the most likely token of each row."""
    logits[:, TOKEN] = 1
    return logits


def engine(rounds: int) -> list[Row]:
    """A step in which all sequences decode."""
    return [_engine(rows, rounds) for rows in SEQUENCES]


def _engine(rows: int, rounds: int) -> Row:
    tokens = CONTEXT_TOKENS + STEPS * rounds + WARM_UP_STEPS
    blocks = rows * -(-tokens // BLOCK_TOKENS)
    runner = Instant(blocks, rows)
    engine = Engine(runner, BlockAllocator(blocks, BLOCK_TOKENS), 2**15, rows, 0, overlap=True)
    events, random = list[Event](), np.random.default_rng(0)
    sampling = SamplingParams(tokens - CONTEXT_TOKENS)
    prompts = [text_prompt(CONTEXT_TOKENS, random) for _ in range(rows)]
    requests = [submit(engine, prompt, sampling, events.append) for prompt in prompts]
    for _ in range(WARM_UP_STEPS - 2):
        engine.step()
    assert all(request.output_ids for request in requests), "some still wait for their prompt"
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(STEPS):
            engine.step()
        taken.append((time.perf_counter() - start) / STEPS)
        events.clear()
    what = f"a step of {rows} sequences of {CONTEXT_TOKENS} tokens, without the model"
    at_most = 1.0 if rows == max(SEQUENCES) else None
    return Row(what, "the goal", statistics.median(taken), STEP_S, "s", at_most=at_most)


if __name__ == "__main__":
    run("ceiling", __doc__, {"engine": engine}, rounds=5, least_rounds=3)
