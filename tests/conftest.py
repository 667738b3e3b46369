"""Fixtures that many tests share: checkpoints in transformers' format, made once a session."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("framesieve", deadline=None, derandomize=True)
settings.load_profile("framesieve")


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen2.5-VL checkpoint in float32."""
    from demo.checkpoint import TINY, write_checkpoint

    return write_checkpoint(tmp_path_factory.mktemp("tiny"), TINY, seed=1)
