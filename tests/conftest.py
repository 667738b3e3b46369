"""Fixtures that many tests share: checkpoints in transformers' format, made once a session."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("framesieve", deadline=None, derandomize=True)
settings.load_profile("framesieve")

FAMILY_NAMES = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen2.5-VL checkpoint in float32."""
    from demo.checkpoint import TINY, write_checkpoint

    return write_checkpoint(tmp_path_factory.mktemp("tiny"), TINY, seed=1)


@pytest.fixture(scope="session", params=FAMILY_NAMES)
def family(request: pytest.FixtureRequest) -> str:
    """The model type of each family in turn: whatever a test asks of this, it asks of all of them."""
    name: str = request.param
    return name


@pytest.fixture(scope="session")
def family_checkpoint(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random checkpoint of that family in float32."""
    from tests.families import FAMILIES

    return FAMILIES[family].write(tmp_path_factory.mktemp(family), 1)
