"""Checkpoints: what changes the fingerprint, and unusable folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.services.encoder.tower.loading import load_tower
from tests.generation.checkpoints import load


@pytest.fixture
def copy(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "copy"))


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("tokenizer.json", b"}"),
        ("video_preprocessor_config.json", b"}"),
        ("model.safetensors", b""),  # the last byte of the weights
        ("model.safetensors", b"weight"),  # of a name in the header
    ],
)
def test_a_fingerprint_covers_json_files_and_weights(
    tiny_checkpoint: Path, copy: Path, name: str, place: bytes
) -> None:
    fingerprint = Checkpoint(tiny_checkpoint).fingerprint
    assert Checkpoint(copy).fingerprint == fingerprint
    changed = bytearray((copy / name).read_bytes())
    changed[changed.index(place) if place else -1] ^= 1
    (copy / name).write_bytes(changed)
    assert Checkpoint(copy).fingerprint != fingerprint


def test_the_part_that_reads_of_a_model_that_also_speaks_is_the_model(copy: Path) -> None:
    thinker = {"model_type": "qwen3_omni_moe_thinker", "vision_config": {"patch_size": 16}}
    whole = {"model_type": "qwen3_omni_moe", "dtype": "bfloat16", "thinker_config": thinker, "talker_config": {}}
    (copy / "config.json").write_text(json.dumps(whole))
    checkpoint = Checkpoint(copy)
    assert checkpoint.model_type == "qwen3_omni_moe"
    assert checkpoint.config.part("vision_config").whole("patch_size") == 16
    assert checkpoint.config["dtype"] == "bfloat16"


LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n"


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("model.safetensors", None, r"it has no \.safetensors file"),
        ("config.json", None, r"it has no config\.json"),
        ("model.safetensors", b"", "model.safetensors is not a whole safetensors file, it has 0 bytes: download"),
        ("model.safetensors", b"\xff" * 100, "model.safetensors is not a whole safetensors file, it has 100 bytes"),
        ("model.safetensors", LFS_POINTER, "model.safetensors is a Git LFS pointer, .* `git lfs pull`"),
        ("tokenizer.json", LFS_POINTER, "tokenizer.json is a Git LFS pointer"),
        (
            "model.safetensors.index.json",
            b'{"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}',
            "lacks model-2.safetensors, which model.safetensors.index.json names",
        ),
    ],
)
def test_a_checkpoint_that_is_not_whole_is_refused_by_the_file_to_mend(
    copy: Path, name: str, content: bytes | None, complaint: str
) -> None:
    if content is None:
        (copy / name).unlink()
    else:
        (copy / name).write_bytes(content)
    with pytest.raises(StartupError, match=complaint):
        Checkpoint.find(copy)


def test_a_truncated_file_and_a_folder_that_does_not_exist_are_refused(copy: Path, tmp_path: Path) -> None:
    weights = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(weights[:-1])
    with pytest.raises(StartupError, match=rf"has {len(weights) - 1} bytes, its header says {len(weights)}: download"):
        Checkpoint.find(copy)
    with pytest.raises(StartupError, match="does not exist: pass a folder"):
        Checkpoint.find(tmp_path / "nowhere")


def test_a_repository_that_cannot_be_downloaded_is_named_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """One in the cache is served without a connection in integration/test_serve.py."""

    def fail(*_: object, **__: object) -> str:
        raise OSError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(StartupError, match=r"a/b is not a folder, and could not be downloaded .*: no route"):
        Checkpoint.find(Path("a/b"))


def test_weights_are_those_of_the_files_that_the_index_names_and_without_one_of_model_safetensors(copy: Path) -> None:
    def of(folder: Path) -> list[Tensor]:
        tower = load_tower(Checkpoint(folder), "float32", torch.device("cpu"))
        return [load(folder).embed_tokens.weight, next(tower.forward.layers[0].parameters())]  # type: ignore[attr-defined]

    expected, weights = of(copy), load_file(copy / "model.safetensors")
    for stale in ("model_ema.safetensors", "model-00002-of-00002.safetensors"):
        save_file({name: 2 * weight for name, weight in weights.items()}, copy / stale)
    assert all(map(torch.equal, of(copy), expected))
    (copy / "model.safetensors").rename(copy / "model-00001-of-00001.safetensors")
    (copy / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": dict.fromkeys(weights, "model-00001-of-00001.safetensors")})
    )
    assert all(map(torch.equal, of(copy), expected))
    whole = Qwen2_5_VLForConditionalGeneration.from_pretrained(copy)
    assert torch.equal(whole.model.language_model.embed_tokens.weight, expected[0])


def test_a_download_takes_no_copies_of_the_weights_in_the_layout_of_other_code(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = ["consolidated.safetensors", "consolidated-00001-of-00002.safetensors", "original/model.safetensors"]
    wanted = ["additional_chat_templates/tool_use.jinja", "mtp.safetensors", "transformer/model.safetensors"]
    for name in (*others, *wanted):
        (copy / name).parent.mkdir(exist_ok=True)
        shutil.copy(copy / "model.safetensors", copy / name)
    published = [str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()]

    def snapshot_download(repository: str, local_files_only: bool = False, **patterns: list[str]) -> str:
        """Takes files by their patterns, as the hub's client does."""
        if local_files_only:
            raise FileNotFoundError(repository)
        for name in filter_repo_objects(published, **patterns):
            (tmp_path / "snapshot" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(copy / name, tmp_path / "snapshot" / name)
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    folder = Checkpoint.find(Path("a/b")).folder
    taken = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert taken >= {*wanted, "config.json", "model.safetensors"}
    assert not taken & {*others}


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("qwen/", "qwen"),
        ("other/../qwen", "qwen"),
        (".", "qwen"),
        ("latest", "latest"),  # a link is named by who made it
        ("hub/models--Qwen--Qwen2.5-VL-3B-Instruct/snapshots/66285546d2b8", "Qwen/Qwen2.5-VL-3B-Instruct"),
        ("hub/models--a--b/snapshots/66285546d2b8/part", "part"),
    ],
)
def test_a_folder_has_its_own_name_and_a_snapshot_that_of_its_repository(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, name: str
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "qwen").symlink_to(tiny_checkpoint)
    (tmp_path / "latest").symlink_to("qwen")
    if given.startswith("hub"):
        (tmp_path / given).parent.mkdir(parents=True)
        (tmp_path / given).symlink_to(tiny_checkpoint)
    if given == ".":
        shutil.copytree(tiny_checkpoint, tmp_path / "other" / "qwen")
        monkeypatch.chdir(tmp_path / "other" / "qwen")
    else:
        given = f"{tmp_path}/{given}"
    assert Checkpoint.find(Path(given)).name == name
