"""Checkpoints: what changes the fingerprint, unusable folders, and the families of the three services."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import services.encoder.families
import services.generation.families
import services.preprocessing.families
from common.checkpoint import Checkpoint
from common.contract.errors import StartupError
from tests.families import FAMILIES


@pytest.fixture
def copy(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "copy"))


@pytest.mark.parametrize(
    ("name", "place"),
    [("tokenizer.json", 1), ("video_preprocessor_config.json", 1), ("model.safetensors", -1), ("model.safetensors", 9)],
)
def test_a_fingerprint_covers_json_files_and_weights(tiny_checkpoint: Path, copy: Path, name: str, place: int) -> None:
    fingerprint = Checkpoint(tiny_checkpoint).fingerprint
    assert Checkpoint(copy).fingerprint == fingerprint
    changed = bytearray((copy / name).read_bytes())
    changed[place] ^= 1
    (copy / name).write_bytes(changed)
    assert Checkpoint(copy).fingerprint != fingerprint


def test_an_unusable_folder_is_refused(copy: Path, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"no config\.json"):
        Checkpoint(tmp_path / "nowhere")
    (copy / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(StartupError, match="no safetensors file"):
        _ = Checkpoint(copy).fingerprint
    (copy / "model.safetensors").unlink()
    with pytest.raises(StartupError, match=r"no \.safetensors"):
        Checkpoint(copy)


def test_every_service_has_the_families_that_are_tested(copy: Path) -> None:
    for registry in (services.preprocessing.families, services.encoder.families, services.generation.families):
        assert set(registry.FAMILIES) == set(FAMILIES)
    (copy / "config.json").write_text('{"model_type": "llava"}')
    with pytest.raises(StartupError, match=r"is a 'llava', supported are qwen2_5_vl, qwen3_vl, qwen3_vl_moe"):
        Checkpoint(copy).pick(FAMILIES)
