"""Fixtures of the encoder's tests, a tower and the service around it, and of guarded listeners: whom they know.

A file that asks every family has a `tower` of its own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.encoder.tower.tower import Tower
from tests.contract.encoder_service import Stack, running, tower_of
from tests.contract.guarded_service import ALICE, BOB


@pytest.fixture(scope="module")
def tower(tiny_checkpoint: Path) -> Tower:
    return tower_of(tiny_checkpoint)


@pytest.fixture
async def stack(tmp_path: Path, tower: Tower) -> AsyncIterator[Stack]:
    async with running(tmp_path, tower) as stack:
        yield stack


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(f"alice {ALICE}\nbob {BOB}\n")
    path.chmod(0o600)
    return path
