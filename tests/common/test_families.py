"""Each service knows the same families, and the tests know them all."""

from __future__ import annotations

from pathlib import Path

import pytest

import services.encoder.families
import services.generation.families
import services.preprocessing.families
from common.checkpoint import Checkpoint
from common.contract.errors import StartupError
from tests.families import FAMILIES

REGISTRIES = (services.preprocessing.families, services.encoder.families, services.generation.families)


@pytest.mark.parametrize("registry", REGISTRIES, ids=lambda registry: registry.__name__.split(".")[1])
def test_every_service_has_every_family_that_is_tested(registry: object) -> None:
    assert set(registry.FAMILIES) == set(FAMILIES)  # type: ignore[attr-defined]


def test_a_family_that_nobody_has_is_refused_with_those_that_exist(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llava"}')
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(StartupError, match=r"is a 'llava', supported are qwen2_5_vl, qwen3_vl, qwen3_vl_moe"):
        Checkpoint(tmp_path).pick(FAMILIES)
