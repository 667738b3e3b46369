"""Settings of the generation service: flags, variables, and refusals at startup."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from unittest.mock import patch

import pytest
import torch
from structlog.testing import capture_logs

from gridsieve.common.adapter_folder import AdapterFolder
from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.common.contract.retention import ItemPruning
from gridsieve.families import family_of
from gridsieve.services.compute.device import device_of
from gridsieve.services.encoder.settings import EncoderSettings
from gridsieve.services.generation.parallel.group import Group
from gridsieve.services.generation.settings import GenerationSettings, check_pruning
from gridsieve.services.generation.startup.build import StepLimits, build, step_limits


def test_a_limit_beyond_the_cache_is_refused(tiny_checkpoint: Path) -> None:
    flags = ("--kv-cache-tokens", "512", "--max-model-len", "513", "--device", "cpu")
    settings = GenerationSettings.load(["--model", str(tiny_checkpoint), *flags])
    with pytest.raises(StartupError, match=r"--max-model-len 513 exceeds .* KV cache of 512 \(--kv-cache-tokens\)"):
        build(settings, Checkpoint(tiny_checkpoint))


def test_steps_too_small_for_the_sequences_that_decode_are_refused(tiny_checkpoint: Path) -> None:
    settings = GenerationSettings.load(["--max-num-batched-tokens", "8", "--max-num-seqs", "9", "--device", "cpu"])
    with pytest.raises(StartupError, match="--max-num-batched-tokens 8 is below --max-num-seqs 9"):
        build(settings, Checkpoint(tiny_checkpoint))


def test_a_head_that_drafts_is_refused_beside_n_grams() -> None:
    with pytest.raises(StartupError, match=r"--draft-model .*--speculative-tokens"):
        GenerationSettings.load(["--draft-model", "head", "--speculative-tokens", "2"])


def test_a_default_threshold_needs_a_method_before_the_tower_and_a_model_that_takes_it(
    checkpoints: Callable[[str], Path],
) -> None:
    flags = ["--pruning-rate", "0.5", "--pruning-threshold", "0.04"]
    assert GenerationSettings.load(flags).pruning({}, "evs") == ItemPruning(0.5, "pixel_change", threshold=0.04)
    with pytest.raises(StartupError, match=r"--pruning-threshold is for pixel_change, the method is vcast"):
        GenerationSettings.load([*flags, "--pruning-method", "vcast"])
    words = "pixel_change at --pruning-rate 0.5 and --pruning-threshold 0.04: must be one of evs, .* reads whole frames"
    with pytest.raises(StartupError, match=words):
        check_pruning(
            family_of(Checkpoint(checkpoints("llava_onevision"))), GenerationSettings.load(flags).pruning({}, "evs")
        )


@pytest.mark.parametrize(
    ("gigabytes", "flags", "expected"),
    [
        (0, (), (2048, 64)),
        (24, (), (2048, 64)),
        (42, (), (8192, 256)),
        (80, ("--max-num-seqs", "32"), (8192, 32)),
        (80, ("--max-num-seqs", "9000"), (9000, 9000)),
        (80, ("--max-num-batched-tokens", "100"), (100, 100)),
        (80, ("--max-num-batched-tokens", "512", "--max-num-seqs", "300"), (512, 300)),
    ],
)
def test_unset_limits_of_a_step_follow_the_memory_of_the_device(
    gigabytes: int, flags: tuple[str, ...], expected: tuple[int, int]
) -> None:
    memory = SimpleNamespace(total_memory=gigabytes * 10**9)
    with patch.object(torch.cuda, "get_device_properties", return_value=memory), capture_logs() as logs:
        found = step_limits(GenerationSettings.load(list(flags)), torch.device("cuda" if gigabytes else "cpu"))
    assert found == StepLimits(*expected)
    assert (logs[0]["max_num_batched_tokens"], logs[0]["max_num_seqs"]) == expected


def test_the_rank_with_the_least_memory_decides_on_the_limits_of_a_step() -> None:
    group = cast(Group, SimpleNamespace(least=lambda memory: min(memory, 24 * 10**9)))
    with patch.object(torch.cuda, "get_device_properties", return_value=SimpleNamespace(total_memory=80 * 10**9)):
        assert step_limits(GenerationSettings.load([]), torch.device("cuda"), group) == StepLimits(2048, 64)


def test_a_missing_device_is_refused() -> None:
    with pytest.raises(StartupError, match="--device cuda:77 cannot be used"):
        device_of("cuda:77", "--tensor-parallel", 1)


def test_adapters_are_set_by_flag_or_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = (AdapterFolder("traffic", Path("/models/a=b")), AdapterFolder("Sports-2.1", Path("loras/sports")))
    value = "traffic=/models/a=b, Sports-2.1=loras/sports"
    assert GenerationSettings.load(["--adapters", value]).adapters == expected
    monkeypatch.setenv("GRIDSIEVE_ADAPTERS", value)
    assert GenerationSettings.load([]).adapters == expected
    assert GenerationSettings.load(["--adapters", ""]).adapters == ()
    sent = EncoderSettings.load([]).model_dump(mode="json")  # to the other ranks of the encoder
    assert EncoderSettings(**sent).adapters == expected


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


@pytest.mark.parametrize(("flag", "value"), [("--pruning-rate", "1"), ("--pruning-method", "best")])
def test_a_pruning_that_no_request_could_have_is_refused(flag: str, value: str) -> None:
    with pytest.raises(StartupError, match=f"^{flag}: .*got '{value}'"):
        GenerationSettings.load([flag, value])
