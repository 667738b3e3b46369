"""A file for `--auth-tokens-file`, and a tower."""

from __future__ import annotations

from pathlib import Path

import pytest

from gridsieve.services.encoder.tower.tower import Tower
from tests.common.guarded_service import ALICE, BOB
from tests.encoder.encoder_service import tower_of


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(f"alice {ALICE}\nbob {BOB}\n")
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def tower(tiny_checkpoint: Path) -> Tower:
    return tower_of(tiny_checkpoint)
