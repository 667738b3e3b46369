"""Fixtures of a tower of several ranks: a tower of each family, and as many ranks as a test wants.

A file that uses them names this one as its `pytest_plugins`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import torch

from common.checkpoint import Checkpoint
from services.encoder.families import load_tower
from services.encoder.tower.parallel.exchange import Exchange
from services.encoder.tower.parallel.rank_failure import RankFailure
from services.encoder.tower.parallel.tower import DataParallelTower
from services.encoder.tower.tower import Tower
from tests.encoder.thread_ranks import Made, Ranks, RecordingTower, ThreadRanks


@pytest.fixture(scope="module")
def tower(family_checkpoint: Path) -> Tower:
    torch.set_num_threads(1)
    return load_tower(Checkpoint(family_checkpoint), "float32", torch.device("cpu"))


@pytest.fixture(scope="module")
def ranks_of(tower: Tower) -> Iterator[Ranks]:
    """Makes a tower of so many ranks."""
    made: list[ThreadRanks] = []

    def make(count: int, rank_tokens: int = 10_000, own: Tower = tower) -> Made:
        rank_failure = RankFailure()
        rank_failure.watch(lambda: None)
        others = ThreadRanks(count, own, rank_tokens, rank_failure)
        made.append(others)
        recording = cast(Tower, RecordingTower(own))
        return DataParallelTower(recording, others, count, Exchange(others.group(0)), rank_tokens, rank_failure), others

    yield make
    for each in made:
        each.close()
