"""A file of bearer tokens, as `--auth-tokens-file` reads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.common.guarded_service import ALICE, BOB


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(f"alice {ALICE}\nbob {BOB}\n")
    path.chmod(0o600)
    return path
