"""Weights in 4 bits beside bfloat16: `python -m benchmarks.int4`.

A random checkpoint with layers as those of Qwen2.5-VL-3B, but six of 36 and a small vocabulary: 462 M weights. Both
models are in this process and alternate in every round. The steps are the engine's; medians over all of them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.models import CPU, QWEN2_5_VL_3B
from benchmarks.prompts import text_prompt, timed_steps
from benchmarks.report import run
from benchmarks.table import Row, Timings
from demo.checkpoint import write_checkpoint
from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.process import keep_freed_memory
from gridsieve.services.compute.int4_linear import Int4Linear, Int4Weight
from gridsieve.services.compute.packed_linear import JoinedLinear
from gridsieve.services.generation.engine.engine import Engine
from gridsieve.services.generation.loading import load_language_model
from gridsieve.services.generation.memory.blocks import BlockAllocator
from gridsieve.services.generation.model.language_model import LanguageModel
from gridsieve.services.generation.model.runner import Runner

SHAPE = replace(QWEN2_5_VL_3B.shape, merges=64, layers=6, tower_depth=1, full_attention_blocks=(0,))
PROMPT_TOKENS, STEPS = 32, 10
BLOCKS, BLOCK_TOKENS = 64, 16
KINDS = ("int4", "bfloat16")


@contextmanager
def models() -> Iterator[dict[str, LanguageModel]]:
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Checkpoint(write_checkpoint(Path(folder), SHAPE, 1, torch.bfloat16))
        load = partial(load_language_model, checkpoint, torch.bfloat16, CPU)
        yield {"int4": load(quantization="int4"), "bfloat16": load()}


def steps(rounds: int) -> list[Row]:
    """A step that decodes, and the step of a prompt; and what weights take."""
    taken, rows, random = Timings(), list[Row](), np.random.default_rng(1)
    with models() as found:
        for index in range(rounds + 1):
            for clients in (1, 4):
                for kind, model in found.items():
                    runner = Runner(model, BLOCKS, BLOCK_TOKENS)
                    engine = Engine(runner, BlockAllocator(BLOCKS, BLOCK_TOKENS), PROMPT_TOKENS * clients, clients, 8)
                    prompts = [text_prompt(PROMPT_TOKENS, random) for _ in range(clients)]
                    for what, seconds in timed_steps(engine, prompts, STEPS):
                        if index:
                            taken.add(f"{what} {clients} {kind}", seconds)
        sizes = {kind: size_bytes(model) for kind, model in found.items()}
    for name, what, goal in (
        ("decode 1", "a step that decodes, one client", 0.45),
        ("decode 4", "a step that decodes, 4 clients", None),
        ("prompt 1", f"a prompt of {PROMPT_TOKENS} tokens", None),
        ("prompt 4", f"4 prompts of {PROMPT_TOKENS} tokens", None),
    ):
        ours, theirs = (taken.median(f"{name} {kind}") for kind in KINDS)
        rows.append(Row(what, "bfloat16", ours, theirs, "s", at_most=goal))
    return [*rows, Row("weights", "bfloat16", sizes["int4"], sizes["bfloat16"], "bytes", at_most=0.32)]


def size_bytes(model: LanguageModel) -> int:
    """Of a model's weights."""
    weights = {
        each._product.weight if isinstance(each, JoinedLinear) else each.int4
        for each in model.text.modules()
        if isinstance(each, JoinedLinear | Int4Linear)
    }
    packed = sum(each.size_bytes for each in weights if isinstance(each, Int4Weight))
    return packed + sum(each.nbytes for each in (*model.text.parameters(), *model.lm_head.parameters()))


if __name__ == "__main__":
    run("int4", __doc__, {"steps": steps}, rounds=3, least_rounds=1)
