"""The model that most tests of the engine use, and what tests of graphs overwrite."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from gridsieve.services.generation.model import graphs
from gridsieve.services.generation.parallel.group import WorkerRanks
from gridsieve.services.generation.request.batch import Packed
from tests import parallel_rank
from tests.tiny import Models, load_models

UNUSED = 2**30


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    torch.set_num_threads(1)
    return load_models("qwen2_5_vl", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def workers() -> Iterator[WorkerRanks]:
    """Rank 0's side of two ranks, of which the other is one process for the tests of all files."""
    torch.set_num_threads(1)
    workers = WorkerRanks(2, (), torch.device("cpu"), parallel_rank.MODULE)
    yield workers
    workers.close()


@pytest.fixture
def rows_overwritten() -> Iterator[None]:
    """Overwrites what must not be read: before a replay the output of the last one, after it its input rows."""
    replay = graphs._Graph.replay

    def replay_and_overwrite(graph: graphs._Graph, decodes: Packed, ids: Tensor) -> Any:
        for output in (graph._captured.output, graph._hidden):
            if output is not None:
                output.fill_(torch.nan)
        found = replay(graph, decodes, ids)
        rows, *parts = graph.inputs
        rows[:, : graphs.FIRST_BLOCK] = UNUSED
        tables = rows[:, graphs.FIRST_BLOCK :].numpy()
        tables[:] = np.random.default_rng(0).integers(0, tables.max() + 1, tables.shape)
        for each in parts:
            each.fill_(UNUSED)
        return found

    with patch.object(graphs._Graph, "replay", replay_and_overwrite):
        yield
