"""The price of --deterministic: `python -m benchmarks.deterministic`.

Random checkpoints of 60 M weights with layers as those of Qwen2.5-VL, and of Qwen3.5 with recurrent states, in float32.
The same weights are computed in both ways in this process, in turn. The steps are the engine's, without the compiler;
medians over all of them.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.models import CPU, SMALL, SMALL_RECURRENT, Layout
from benchmarks.prompts import text_prompt, timed_steps
from benchmarks.report import run
from benchmarks.table import Row, Timings
from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.process import keep_freed_memory
from gridsieve.services.generation.engine.engine import Engine
from gridsieve.services.generation.loading import load_language_model
from gridsieve.services.generation.memory.blocks import BlockAllocator
from gridsieve.services.generation.memory.state_slots import StateSlots
from gridsieve.services.generation.model.determinism import made_deterministic
from gridsieve.services.generation.model.language_model import LanguageModel
from gridsieve.services.generation.model.runner import Runner
from gridsieve.services.generation.model.states import RESERVED
from gridsieve.services.generation.startup.same_bits import use_equal_sizes

PROMPT_TOKENS, STEPS = 512, 10
BLOCKS, BLOCK_TOKENS = 512, 16
CLIENTS = (1, 8)
KINDS = ("with it", "without")
LAYOUTS = {"dense": SMALL, "recurrent": SMALL_RECURRENT}


def steps(name: str, layout: Layout, rounds: int) -> list[Row]:
    """A step that decodes, and the steps of a prompt."""
    keep_freed_memory()
    taken, random = Timings(), np.random.default_rng(1)
    with tempfile.TemporaryDirectory() as folder:
        layout.save(layout.drawn(), Path(folder))
        plain, model = (load_language_model(Checkpoint(Path(folder)), torch.float32, CPU) for _ in KINDS)
    found = dict(zip(KINDS, (made_deterministic(model), plain), strict=True))
    for index in range(rounds + 1):
        for clients in CLIENTS:
            for kind, each in found.items():
                prompts = [text_prompt(PROMPT_TOKENS, random) for _ in range(clients)]
                for what, seconds in timed_steps(_engine(each, clients), prompts, STEPS):
                    if index:
                        taken.add(f"{what} {clients} {kind}", seconds)
    rows = []
    for clients in CLIENTS:
        for key, what in (("decode", "a step that decodes"), ("prompt", f"prompts of {PROMPT_TOKENS} tokens")):
            ours, theirs = (taken.median(f"{key} {clients} {kind}") for kind in KINDS)
            rows.append(
                Row(f"{name}: {what}, {clients} client{'s' * (clients > 1)}", "without the flag", ours, theirs, "s")
            )
    return rows


def _engine(model: LanguageModel, clients: int) -> Engine:
    slots = 3 * clients if model.states else 0
    runner = Runner(model, BLOCKS, BLOCK_TOKENS, state_slots=slots)
    if model.deterministic:
        use_equal_sizes(runner, BLOCKS, BLOCK_TOKENS)
    states = StateSlots(slots, RESERVED) if slots else None
    allocator = BlockAllocator(BLOCKS, BLOCK_TOKENS)
    return Engine(runner, allocator, PROMPT_TOKENS * clients, clients, 8, states=states)


if __name__ == "__main__":
    measurements = {name: partial(steps, name, layout) for name, layout in LAYOUTS.items()}
    run("deterministic", __doc__, measurements, rounds=3, least_rounds=1)
