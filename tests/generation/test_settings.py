"""Settings of the generation service: flags, variables, and refusals at startup."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from common.checkpoint import Checkpoint
from common.contract.errors import StartupError
from common.process import ExitStatus
from services.generation.settings import AdapterFolder, GenerationSettings
from services.generation.startup.build import build, device_of


def test_flags_override_variables_which_override_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRAMESIEVE_KV_CACHE_TOKENS", "4096")
    monkeypatch.setenv("FRAMESIEVE_ENCODER", "unix:/tmp/encoder")
    settings = GenerationSettings.load(["--kv-cache-tokens", "512", "--threads", "2"])
    assert (settings.kv_cache_tokens, settings.encoder, settings.threads) == (512, "unix:/tmp/encoder", 2)
    assert (settings.listen, settings.metrics_port) == ("127.0.0.1:50053", 9103)


def test_the_old_names_of_limits_still_work() -> None:
    old = ["--prefill-chunk-tokens", "5", "--max-prompt-tokens=6", "--max-running-requests", "7"]
    new = ["--max-num-batched-tokens", "5", "--max-model-len=6", "--max-num-seqs", "7"]
    assert GenerationSettings.load(old).model_dump() == GenerationSettings.load(new).model_dump()
    names = [name for _, name in GenerationSettings.load(old).old_names]
    assert names == [
        "--max-num-batched-tokens",
        "--max-model-len",
        "--max-num-seqs",
    ]


@pytest.mark.deep
def test_an_unsupported_generation_config_ends_the_service_with_status_2(tmp_path: Path, tiny_checkpoint: Path) -> None:
    model = shutil.copytree(tiny_checkpoint, tmp_path / "changed")
    path = model / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_beams": 4}))
    flags = ("--metrics-port", "0", "--model", str(model), "--listen", f"unix:{tmp_path}/s")
    ended = subprocess.run(
        [sys.executable, "-m", "services.generation", *flags], capture_output=True, text=True, timeout=100
    )
    assert ended.returncode == ExitStatus.CANNOT_START
    assert '"error": "generation_config.json: num_beams = 4' in (ended.stdout + ended.stderr).splitlines()[-1]


def test_a_limit_beyond_the_cache_is_refused(tiny_checkpoint: Path) -> None:
    flags = ("--kv-cache-tokens", "512", "--max-model-len", "513", "--device", "cpu")
    settings = GenerationSettings.load(["--model", str(tiny_checkpoint), *flags])
    with pytest.raises(StartupError, match=r"--max-model-len 513 exceeds .* KV cache of 512 \(--kv-cache-tokens\)"):
        build(settings, Checkpoint(tiny_checkpoint))


def test_a_missing_device_is_refused() -> None:
    with pytest.raises(StartupError, match="--device cuda:77 cannot be used"):
        device_of(GenerationSettings.load(["--device", "cuda:77"]))


def test_adapters_are_set_by_flag_or_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = (AdapterFolder("traffic", Path("/models/a=b")), AdapterFolder("Sports-2.1", Path("loras/sports")))
    value = "traffic=/models/a=b, Sports-2.1=loras/sports"
    assert GenerationSettings.load(["--adapters", value]).adapters == expected
    monkeypatch.setenv("FRAMESIEVE_ADAPTERS", value)
    assert GenerationSettings.load([]).adapters == expected
    assert GenerationSettings.load(["--adapters", ""]).adapters == ()


@pytest.mark.parametrize(
    ("adapters", "message"),
    [
        ("traffic", r"must be NAME=DIR, got 'traffic'"),
        ("traffic=", r"must be NAME=DIR, got 'traffic='"),
        ("=/models/a", r"'' is not an adapter name, which must be a letter or digit and .*, got '=/models/a'"),
        ("../a=/models/a", r"'../a' is not an adapter name, .*, got '../a=/models/a'"),
        ("a =/models/a", r"'a ' is not an adapter name"),
        (f"{'a' * 65}=/models/a", r"at most 63 more"),
        ("a=/models/a,b=/models/b,a=/models/c", r"two adapters are named 'a'"),
    ],
)
def test_adapters_without_a_folder_or_a_valid_unique_name_are_refused(adapters: str, message: str) -> None:
    with pytest.raises(StartupError, match=f"--adapters.*{message}") as refused:
        GenerationSettings.load(["--adapters", adapters])
    assert str(refused.value).count("got") == 1
