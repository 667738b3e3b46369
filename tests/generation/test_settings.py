"""Generation starts as it is told to, or says what is wrong and ends with status 2."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from common.contract.errors import StartupError
from services.generation.settings import AdapterFolder, GenerationSettings


def start(*arguments: str) -> tuple[int, str]:
    """Runs the service until it ends; returns its status and what it said."""
    ended = subprocess.run(
        [sys.executable, "-m", "services.generation", "--metrics-port", "0", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
    )
    return ended.returncode, ended.stdout + ended.stderr


def changed(checkpoint: Path, folder: Path, name: str, **fields: Any) -> Path:
    """A copy of a checkpoint with fields of one of its JSON files changed."""
    copy = folder / "changed"
    shutil.copytree(checkpoint, copy)
    path = copy / name
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return copy


def test_every_flag_has_a_default_and_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRAMESIEVE_KV_CACHE_TOKENS", "4096")
    monkeypatch.setenv("FRAMESIEVE_ENCODER", "unix:/tmp/encoder")
    settings = GenerationSettings.load(["--kv-cache-tokens", "512", "--threads", "2"])
    assert (settings.kv_cache_tokens, settings.encoder, settings.threads) == (512, "unix:/tmp/encoder", 2)
    assert (settings.listen, settings.metrics_port) == ("127.0.0.1:50053", 9103)


def test_an_unsupported_field_of_the_generation_config_refuses_to_start(tmp_path: Path, tiny_checkpoint: Path) -> None:
    model = changed(tiny_checkpoint, tmp_path, "generation_config.json", num_beams=4)
    status, said = start("--model", str(model), "--listen", f"unix:{tmp_path}/s")
    assert status == 2
    assert '"error": "generation_config.json: num_beams = 4' in said.splitlines()[-1]


def test_a_limit_beyond_the_cache_refuses_to_start(tmp_path: Path, tiny_checkpoint: Path) -> None:
    flags = ("--kv-cache-tokens", "512", "--max-model-len", "513")
    status, said = start("--model", str(tiny_checkpoint), "--listen", f"unix:{tmp_path}/s", *flags)
    assert status == 2
    assert "--max-model-len 513 is more than" in said
    assert "cache's 512" in said


def test_more_ranks_than_can_share_the_heads_refuse_to_start(tmp_path: Path, tiny_checkpoint: Path) -> None:
    flags = ("--tensor-parallel", "3")
    status, said = start("--model", str(tiny_checkpoint), "--listen", f"unix:{tmp_path}/s", *flags)
    assert status == 2
    assert "--tensor-parallel 3 must divide the model's 4 attention heads and 2 KV heads" in said.splitlines()[-1]


def test_a_device_that_is_not_there_refuses_to_start(tmp_path: Path, tiny_checkpoint: Path) -> None:
    status, said = start("--model", str(tiny_checkpoint), "--listen", f"unix:{tmp_path}/s", "--device", "cuda:77")
    assert status == 2
    assert "--device cuda:77 cannot be used" in said


def test_adapters_are_told_by_flag_or_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = (AdapterFolder("traffic", Path("/models/a=b")), AdapterFolder("Sports-2.1", Path("loras/sports")))
    said = "traffic=/models/a=b, Sports-2.1=loras/sports"
    assert GenerationSettings.load(["--adapters", said]).adapters == expected
    monkeypatch.setenv("FRAMESIEVE_ADAPTERS", said)
    assert GenerationSettings.load([]).adapters == expected
    assert GenerationSettings.load(["--adapters", ""]).adapters == ()


@pytest.mark.parametrize(
    ("adapters", "message"),
    [
        ("traffic", r"must be NAME=DIR, got 'traffic'"),
        ("traffic=", r"must be NAME=DIR, got 'traffic='"),
        ("=/models/a", r"'' is no adapter's name, which begins with a letter or a digit.*, got '=/models/a'"),
        ("../a=/models/a", r"'../a' is no adapter's name, .*, got '../a=/models/a'"),
        ("two words=/models/a", r"'two words' is no adapter's name"),
        ("a =/models/a", r"'a ' is no adapter's name"),
        (f"{'a' * 65}=/models/a", r"at most 63 more"),
        ("a=/models/a,b=/models/b,a=/models/c", r"two adapters are named 'a'"),
    ],
)
def test_adapters_without_a_folder_or_a_name_of_their_own_refuse_to_start(adapters: str, message: str) -> None:
    with pytest.raises(StartupError, match=f"--adapters.*{message}") as refused:
        GenerationSettings.load(["--adapters", adapters])
    assert str(refused.value).count("got") == 1
