"""A tower with several embedding levels, and the encoder service around it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from gridsieve.services.encoder.tower import graphs
from gridsieve.services.encoder.tower.tower import Tower
from tests.encoder.encoder_service import Stack, running, tower_of
from tests.families import FAMILIES, QWEN, FamilyUnderTest

# A mixture of experts has the tower of its dense sibling, and Qwen3.5 that of Qwen3-VL without levels.
QWEN_PARAMS = [
    pytest.param(name, marks=pytest.mark.deep) if "moe" in name or name == "qwen3_5" else name for name in QWEN
]


@pytest.fixture(scope="session", autouse=True)
def _one_round() -> Iterator[None]:
    """Buckets are measured once: times of devices that stand in for CUDA are always the same."""
    with patch.object(graphs, "_ROUNDS", 1):
        yield


@pytest.fixture(scope="session", params=["qwen2_5_vl", "qwen3_vl", pytest.param("qwen3_5", marks=pytest.mark.deep)])
def family(request: pytest.FixtureRequest) -> str:
    """The families with different towers: one has windows, one levels, the last neither."""
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def shape(family: str) -> FamilyUnderTest:
    return FAMILIES[family]


@pytest.fixture(scope="session")
def levels_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-VL checkpoint: the family whose tower has more than one level."""
    return FAMILIES["qwen3_vl"].write(tmp_path_factory.mktemp("qwen3_vl"), 1)


@pytest.fixture(scope="session")
def tower(levels_checkpoint: Path) -> Tower:
    return tower_of(levels_checkpoint)


@pytest.fixture
async def stack(tmp_path: Path, tower: Tower) -> AsyncIterator[Stack]:
    async with running(tmp_path, tower) as stack:
        yield stack
