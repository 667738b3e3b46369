"""A tower, and the encoder service around it.

A file that asks every family has a `tower` of its own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.encoder.tower.tower import Tower
from tests.encoder.encoder_service import Stack, running, tower_of


@pytest.fixture(scope="module")
def tower(tiny_checkpoint: Path) -> Tower:
    return tower_of(tiny_checkpoint)


@pytest.fixture
async def stack(tmp_path: Path, tower: Tower) -> AsyncIterator[Stack]:
    async with running(tmp_path, tower) as stack:
        yield stack
