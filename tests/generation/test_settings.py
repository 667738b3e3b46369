"""Settings of the generation service: flags, variables, and refusals at startup."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.checkpoint import Checkpoint
from common.contract.errors import StartupError
from services.generation.settings import AdapterFolder, GenerationSettings
from services.generation.startup.build import build, device_of


def test_the_old_names_of_limits_still_work() -> None:
    old = ["--prefill-chunk-tokens", "5", "--max-prompt-tokens=6", "--max-running-requests", "7"]
    new = ["--max-num-batched-tokens", "5", "--max-model-len=6", "--max-num-seqs", "7"]
    assert GenerationSettings.load(old).model_dump() == GenerationSettings.load(new).model_dump()


def test_a_limit_beyond_the_cache_is_refused(tiny_checkpoint: Path) -> None:
    flags = ("--kv-cache-tokens", "512", "--max-model-len", "513", "--device", "cpu")
    settings = GenerationSettings.load(["--model", str(tiny_checkpoint), *flags])
    with pytest.raises(StartupError, match=r"--max-model-len 513 exceeds .* KV cache of 512 \(--kv-cache-tokens\)"):
        build(settings, Checkpoint(tiny_checkpoint))


def test_steps_too_small_for_the_sequences_that_decode_are_refused(tiny_checkpoint: Path) -> None:
    settings = GenerationSettings.load(["--max-num-batched-tokens", "8", "--max-num-seqs", "9", "--device", "cpu"])
    with pytest.raises(StartupError, match="--max-num-batched-tokens 8 is below --max-num-seqs 9"):
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
        ("../a=/models/a", r"'../a' is not an adapter name"),
        (f"{'a' * 65}=/models/a", r"is not an adapter name"),
        ("a=/models/a,b=/models/b,a=/models/c", r"two adapters are named 'a'"),
    ],
)
def test_adapters_without_a_folder_or_a_valid_unique_name_are_refused(adapters: str, message: str) -> None:
    with pytest.raises(StartupError, match=f"--adapters.*{message}"):
        GenerationSettings.load(["--adapters", adapters])
