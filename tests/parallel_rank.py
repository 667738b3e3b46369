"""Rank 1 of the tests of tensor parallelism: one worker process for all tests of a file.

`python -m tests.parallel_rank DESCRIPTOR`, started as the service starts its workers. For each folder that it receives
it loads the checkpoint, with the adapters in its folder `adapters`, and executes steps until it receives an empty one.
Its one optional argument is the type of its device; default is the CPU. `assert_law_on_two_ranks` is rank 0's side.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from gridsieve.common.adapter_folder import AdapterFolder
from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.ranks import Orders
from gridsieve.services.generation.loading import load_language_model
from gridsieve.services.generation.model.language_model import LanguageModel
from gridsieve.services.generation.model.runner import Runner
from gridsieve.services.generation.parallel.group import Group, WorkerRanks
from gridsieve.services.generation.startup.adapters import load_adapters
from gridsieve.services.generation.startup.rank import run_steps
from tests.law import Question, answer, assert_law
from tests.tiny import BLOCK_TOKENS, Models, TinyEngine

MODULE = "tests.parallel_rank"
MOST_BLOCKS = 64  # the largest KV cache of an engine on rank 0
MOST_STATES = 32  # and the most slots of recurrent states


def adapters_of(checkpoint: Path) -> list[AdapterFolder]:
    return [AdapterFolder(path.name, path) for path in sorted(checkpoint.glob("adapters/*"))]


def assert_law_on_two_ranks(
    models: Models, folder: Path, workers: WorkerRanks, asked: Sequence[Question]
) -> LanguageModel:
    """folder: of the checkpoint that the ranks load. Returns rank 0's part."""
    workers.ranks.broadcast(str(folder).encode())
    half = load_language_model(Checkpoint(folder), torch.float32, torch.device("cpu"), workers.group)
    engine = TinyEngine(half, blocks=MOST_BLOCKS, workers=workers, max_num_batched_tokens=7)
    assert_law(replace(models, engine=half), engine, asked, answer(engine, asked))
    workers.ranks.broadcast(b"")
    return half


def main() -> None:
    orders = Orders(int(sys.argv[1]))
    kinds: list[str] = orders.facts["arguments"]
    device = torch.device(kinds[0], orders.facts["rank"]) if kinds else torch.device("cpu")
    torch.set_num_threads(1)
    group = Group(orders.facts["rank"], orders.facts["ranks"], Path(orders.facts["meeting"]), device)
    while folder := orders.receive():
        checkpoint = Path(folder.decode())
        model = load_language_model(Checkpoint(checkpoint), torch.float32, device, group)
        load_adapters(adapters_of(checkpoint), model, group)
        run_steps(orders, Runner(model, MOST_BLOCKS, BLOCK_TOKENS, state_slots=MOST_STATES), group)


if __name__ == "__main__":
    main()
