"""A tower that waits at its gate, and a batcher over it, as fixtures.

A file that uses them names this one as its `pytest_plugins`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from services.encoder.items.batcher import Batcher
from tests.encoder.gated_tower import GRID, GatedTower


@pytest.fixture
def gated() -> GatedTower:
    return GatedTower()


@pytest.fixture
def batcher(gated: GatedTower) -> Iterator[Batcher]:
    """Takes one slice a forward."""
    batcher = Batcher(gated.encode, budget_tokens=GRID.slice_tokens)
    yield batcher
    for _ in range(100):
        gated.gate.release()
    batcher.close()
