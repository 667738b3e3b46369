"""A checkpoint's fingerprint changes with whatever decides an answer, and a folder that is none says why."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from common.checkpoint import Checkpoint
from common.contract.errors import StartupError


@pytest.fixture
def copy(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "copy"))


def test_a_copy_has_the_same_fingerprint(tiny_checkpoint: Path, copy: Path) -> None:
    assert Checkpoint(copy).fingerprint == Checkpoint(tiny_checkpoint).fingerprint
    assert len(Checkpoint(copy).fingerprint) == 32


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "video_preprocessor_config.json"])
def test_another_config_tokenizer_or_processor_is_another_fingerprint(
    tiny_checkpoint: Path, copy: Path, name: str
) -> None:
    (copy / name).write_bytes((copy / name).read_bytes() + b"\n")
    assert Checkpoint(copy).fingerprint != Checkpoint(tiny_checkpoint).fingerprint


@pytest.mark.parametrize("place", [-1, -60_000])
def test_other_weights_are_another_fingerprint(tiny_checkpoint: Path, copy: Path, place: int) -> None:
    weights = copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[place] ^= 1
    weights.write_bytes(data)
    assert Checkpoint(copy).fingerprint != Checkpoint(tiny_checkpoint).fingerprint


def test_a_folder_without_config_or_weights_is_no_checkpoint(copy: Path, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"no config\.json"):
        Checkpoint(tmp_path / "nowhere")
    (copy / "model.safetensors").unlink()
    with pytest.raises(StartupError, match=r"no \.safetensors"):
        Checkpoint(copy)


def test_weights_that_are_no_safetensors_refuse_to_start(copy: Path) -> None:
    (copy / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(StartupError, match="no safetensors file"):
        _ = Checkpoint(copy).fingerprint
