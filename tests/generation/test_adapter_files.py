"""Adapter files that the service cannot compute exactly are refused at startup, with adapter, field and value."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from common.contract.errors import InvalidRequest, StartupError
from services.generation.model.language_model import LanguageModel
from services.generation.settings import AdapterFolder
from services.generation.startup.adapter_files import load_adapters
from tests.generation.adapted_models import Adapted, engine_of, load_adapted, rewrite, spoiled

KEYS = "base_model.model."


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return load_adapted("qwen2_5_vl", tmp_path_factory.mktemp("adapted"))


@pytest.fixture(scope="module")
def bare(adapted: Adapted) -> LanguageModel:
    return engine_of(adapted.models.folder)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, r"peft_type = 'IA3' is not supported"),
        ({"bias": "all"}, r"bias = 'all' is not supported"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save = \['lm_head'\] is not supported"),
        ({"use_dora": True}, r"use_dora = True is not supported"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, r"target_parameters = \['mlp.experts.gate_up_proj'\]"),
        ({"init_lora_weights": "pissa"}, r"init_lora_weights = 'pissa' is not supported"),
        ({"use_next_year": 0.5}, r"use_next_year = 0.5 is not known to PEFT \d"),
        ({"r": 0}, r"r = 0 is not supported: Input should be greater than 0"),
        ({"rank_pattern": ["q_proj"]}, r"rank_pattern = \['q_proj'\] is not supported"),
        (
            {"alpha_pattern": {"*": 8}},
            r"adapter_config.json: .*\(\*\).* is not a regular expression: nothing to repeat",
        ),
        ({"target_modules": "("}, r"adapter_config.json: '\(' is not a regular expression: missing \)"),
        ({"target_modules": "a{99999999999}"}, r"the repetition number is too large"),
        ({"target_modules": 5}, r"target_modules = 5 is not supported"),
        ({"target_modules": "all-linear"}, r"holds weights of .*_proj, which target_modules = 'all-linear' does not"),
        ({"lora_alpha": float("nan")}, r"lora_alpha = nan is not supported: Input should be a finite number"),
        ({"lora_alpha": 1e300}, r"weights of .*_proj, scaled by 3.3+\d?e\+299, are not finite as torch.float32"),
        ({"r": 4}, r"q_proj.lora_A must have shape \[4, 64\] by adapter_config.json and the model, got \[3, 64\]"),
        ({"target_modules": None}, r"target_modules = None is empty"),
        ({"target_modules": ["q_proj"]}, r"holds weights of .*v_proj, which target_modules = \['q_proj'\] does not"),
        ({"target_modules": ["q_proj", "v_proj", "o_proj"]}, r"lacks weights of .*o_proj, which .* targets"),
        (
            {"layers_to_transform": [0], "layers_pattern": "layers"},
            r"holds weights of layers.1.*, which target_modules = .* does not target",
        ),
    ],
)
def test_a_config_that_is_not_implemented_is_refused(
    adapted: Adapted, bare: LanguageModel, tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(StartupError, match=rf"--adapters mine={tmp_path}/spoiled: .*{message}"):
        load_adapters([spoiled(adapted, tmp_path / "spoiled", **config)], bare)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("lm_head.lora_A.weight", "not experts, embeddings, the output layer or the vision tower"),
        ("embed_tokens.lora_embedding_A", "only linear layers of the language model's blocks"),
        ("visual.blocks.0.attn.qkv.lora_A.weight", "visual.blocks.0.attn.qkv.lora_A.weight; only linear layers"),
        ("layers.9.self_attn.q_proj.lora_A.weight", "layers.9.self_attn.q_proj.lora_A.weight; only linear layers"),
        ("layers.0.self_attn.k_proj.lora_A.weight", "lora_A of layers.0.self_attn.k_proj but not its counterpart"),
        ("model.layers.0.self_attn.k_proj.lora_A.weight", r"got the prefixes \['', 'model.'\]"),
    ],
)
def test_weights_of_other_modules_are_refused(
    adapted: Adapted, bare: LanguageModel, tmp_path: Path, key: str, message: str
) -> None:
    folder = spoiled(adapted, tmp_path / "spoiled")
    rewrite(folder.path, lambda weights: weights.update({KEYS + key: torch.zeros(3, 64)}))
    with pytest.raises(StartupError, match=message):
        load_adapters([folder], bare)


@pytest.mark.parametrize("side", ["A", "B"])
def test_weights_that_are_not_finite_are_refused(
    adapted: Adapted, bare: LanguageModel, tmp_path: Path, side: str
) -> None:
    folder, key = spoiled(adapted, tmp_path / "spoiled"), f"{KEYS}layers.1.self_attn.v_proj.lora_{side}.weight"
    rewrite(folder.path, lambda weights: weights[key].view(-1)[-1:].fill_(float("nan")))
    with pytest.raises(StartupError, match=r"weights of layers.1.self_attn.v_proj, .*, are not finite"):
        load_adapters([folder], bare)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("adapter_config.json", None, "the folder has no adapter_config.json"),
        ("adapter_config.json", b"[]", "is not a JSON object with a peft_type"),
        ("adapter_config.json", b'{"r": 8}', "is not a JSON object with a peft_type"),
        ("adapter_config.json", b"[" * 100_000, "--adapters mine=.*maximum recursion depth exceeded"),
        ("adapter_model.safetensors", None, "has no adapter_model.safetensors; other formats are not supported"),
        ("adapter_model.safetensors", b"not weights", "cannot be read"),
    ],
)
def test_a_missing_or_broken_file_is_refused_and_nothing_is_unpickled(
    adapted: Adapted, bare: LanguageModel, tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    folder = spoiled(adapted, tmp_path / "spoiled")
    torch.save(load_file(folder.path / "adapter_model.safetensors"), folder.path / "adapter_model.bin")
    (folder.path / name).unlink()
    if content is not None:
        (folder.path / name).write_bytes(content)
    with pytest.raises(StartupError, match=message):
        load_adapters([folder], bare)


def test_a_folder_that_cannot_be_read_is_refused(bare: LanguageModel, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"--adapters mine=.*: \[Errno \d+\] File name too long"):
        load_adapters([AdapterFolder("mine", tmp_path / ("a" * 300))], bare)


def test_fields_without_effect_and_unset_unknown_fields_are_accepted(adapted: Adapted, tmp_path: Path) -> None:
    without_effect = {"base_model_name_or_path": "someone/else-7B", "fan_in_fan_out": True, "inference_mode": False}
    later = {"use_next_year": False, "next_year_config": None}
    model = engine_of(adapted.models.folder, spoiled(adapted, tmp_path / "other", **without_effect, **later))
    assert model.adapters.find("mine").name == "mine"
    with pytest.raises(InvalidRequest, match=r"adapter must be one of mine, got 'no-such'"):
        model.adapters.find("no-such")


def test_without_peft_adapters_are_refused_with_the_package_to_install(
    adapted: Adapted, bare: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    load_adapters([], bare)
    with pytest.raises(StartupError, match=r"needs PEFT, which is not installed: pip install 'framesieve\[lora\]'"):
        load_adapters([AdapterFolder("mine", adapted.folder / "plain")], bare)


def test_ranks_that_read_different_adapter_files_refuse_to_start(
    adapted: Adapted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.generation.startup.adapter_files._of_rank", lambda addition, *_: addition)
    group: Any = SimpleNamespace(agree=lambda _: False)
    with pytest.raises(StartupError, match="--adapters: the ranks have read different files"):
        load_adapters([AdapterFolder("mine", adapted.folder / "plain")], engine_of(adapted.models.folder), group)
