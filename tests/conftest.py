"""Fixtures that many tests share: checkpoints in transformers' format, made once a session, and Prometheus' tools."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import settings

from services.preprocessing.families import FAMILIES

settings.register_profile("framesieve", deadline=None, derandomize=True)
settings.load_profile("framesieve")


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen2.5-VL checkpoint in float32."""
    from demo.checkpoint import TINY, write_checkpoint

    return write_checkpoint(tmp_path_factory.mktemp("tiny"), TINY, seed=1)


@pytest.fixture(scope="session", params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    """The model type of each family in turn: whatever a test asks of this, it asks of all of them."""
    name: str = request.param
    return name


@pytest.fixture(scope="session")
def family_checkpoint(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random checkpoint of that family in float32."""
    from tests import families

    return families.FAMILIES[family].write(tmp_path_factory.mktemp(family), 1)


@pytest.fixture(scope="session")
def promtool() -> str:
    return _debian("promtool", "prometheus")


@pytest.fixture(scope="session")
def prometheus() -> str:
    return _debian("prometheus", "prometheus")


def _debian(program: str, package: str) -> str:
    """Where a program is that no Python package brings."""
    found = shutil.which(program)
    if found is None:
        how = f"{program} is not installed: apt-get install {package}"
        # Nothing may be left out where changes are judged.
        pytest.fail(how) if os.environ.get("CI") else pytest.skip(how)
    return found
