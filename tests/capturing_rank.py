"""Two ranks that capture decode steps on the CPU, of which some fail.

`python -m tests.capturing_rank CHECKPOINT FAILING WHERE` is rank 0, and starts rank 1 as the service does. FAILING: the
ranks that fail, 1 or 01. WHERE: inside, in the middle of a forward, while another rank waits in it; or after its last
one. Rank 0 prints whether steps are replayed, once a step was computed by both.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.ranks import Orders
from gridsieve.services.compute.graphs import Captured
from gridsieve.services.generation.loading import load_language_model
from gridsieve.services.generation.model.runner import Runner
from gridsieve.services.generation.parallel import group as group_module
from gridsieve.services.generation.parallel.group import Group, WorkerRanks
from gridsieve.services.generation.sampling.sampler import SamplingParams
from gridsieve.services.generation.startup import build
from gridsieve.services.generation.startup.rank import run_steps
from tests.generation.paged_kernels import read_in_place
from tests.oracle import Text
from tests.tiny import BLOCK_TOKENS, TinyEngine

MODULE = "tests.capturing_rank"
CPU = torch.device("cpu")


class FailingCapture:
    """Of two graphs the second fails."""

    def __init__(self, runner: Runner, inside: bool) -> None:
        self._layer, self._inside, self._captured = runner.model.text.layers[1], inside, 0  # type: ignore[index]

    def __call__(self, inputs: Sequence[Tensor], compute: Callable[[], Tensor]) -> Captured:
        self._captured += 1
        hook = None
        if self._captured == 2 and self._inside:
            hook = self._layer.register_forward_pre_hook(_fail)  # type: ignore[union-attr]
        try:
            output = compute()
        finally:
            if hook is not None:
                hook.remove()
        if self._captured == 2:
            _fail()
        return Captured(lambda: None, output)


def _fail(*_: object) -> None:
    raise RuntimeError("out of memory")


def capture(runner: Runner, group: Group, failing: str, where: str) -> None:
    read_in_place(runner)
    makes = FailingCapture(runner, where == "inside")
    if str(group.rank) not in failing:
        makes = lambda inputs, compute: Captured(lambda: None, compute())  # type: ignore[assignment]  # noqa: E731
    with (
        patch.object(build, "CudaCapture", lambda _: makes),
        patch.object(group_module, "_ANSWER", timedelta(seconds=3)),
    ):
        build._capture(runner, 2, 64, group, 0)


def main() -> None:
    torch.set_num_threads(1)
    if len(sys.argv) == 2:
        orders = Orders(int(sys.argv[1]))
        facts = orders.facts
        folder, failing, where = facts["arguments"]
        group = Group(facts["rank"], facts["ranks"], Path(facts["meeting"]), CPU)
        runner = Runner(load_language_model(Checkpoint(Path(folder)), torch.float32, CPU, group), 64, BLOCK_TOKENS)
        capture(runner, group, failing, where)
        run_steps(orders, runner, group)
        return
    folder, failing, where = sys.argv[1:]
    workers = WorkerRanks(2, sys.argv[1:], CPU, MODULE)
    model = load_language_model(Checkpoint(Path(folder)), torch.float32, CPU, workers.group)
    engine = TinyEngine(model, workers=workers)
    capture(engine.runner, workers.group, failing, where)
    asked = engine.ask("0", [Text((10, 11, 12))], SamplingParams(2))
    engine.drain()
    print(f"{len(asked.answer)} tokens, graphs: {engine.runner._graphs is not None}")
    workers.close()


if __name__ == "__main__":
    main()
