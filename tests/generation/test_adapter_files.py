"""Which adapters a service starts with: what is not computed as its files say is refused, and told by name."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from common.contract.errors import InvalidRequest, StartupError
from services.generation.model.language_model import LanguageModel
from services.generation.settings import AdapterFolder
from services.generation.startup.adapter_files import load_adapters
from tests.generation.adapted_models import CONFIGS, Adapted, engine_of, rewrite, spoiled

pytest_plugins = ["tests.generation.adapted_fixtures"]


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
        ({"lora_bias": True}, r"lora_bias = True is not supported"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, r"target_parameters = \['mlp.experts.gate_up_proj'\]"),
        ({"trainable_token_indices": [1, 2]}, r"trainable_token_indices = \[1, 2\] is not supported"),
        ({"layer_replication": [[0, 2], [1, 3]]}, r"layer_replication = \[\[0, 2\], \[1, 3\]\] is not supported"),
        ({"init_lora_weights": "pissa"}, r"init_lora_weights = 'pissa' is not supported"),
        ({"use_bdlora": {"nblocks": 2}}, r"use_bdlora = \{'nblocks': 2\} is not supported"),
        ({"use_next_year": 0.5}, r"use_next_year = 0.5 is not known to PEFT \d"),
        ({"r": 0}, r"r = 0 is not supported: Input should be greater than 0"),
        ({"use_rslora": "false"}, r"use_rslora = 'false' is not supported"),
        ({"rank_pattern": ["q_proj"]}, r"rank_pattern = \['q_proj'\] is not supported"),
        ({"rank_pattern": {"q_proj": "3"}}, r"rank_pattern = \{'q_proj': '3'\} is not supported"),
        ({"alpha_pattern": {"*": 8}}, r"adapter_config.json: .*\(\*\).* is not a regular expression: nothing to repeat"),
        ({"target_modules": "("}, r"adapter_config.json: '\(' is not a regular expression: missing \)"),
        ({"target_modules": "a{99999999999}"}, r"the repetition number is too large"),
        ({"target_modules": 5}, r"target_modules = 5 is not supported"),
        ({"target_modules": ["q_proj", 5]}, r"target_modules = \['q_proj', 5\] is not supported"),
        ({"target_modules": "all-linear"}, r"holds weights of .*_proj, which target_modules = 'all-linear' does not"),
        ({"exclude_modules": "("}, r"adapter_config.json: '\(' is not a regular expression: missing \)"),
        ({"layers_to_transform": "0"}, r"layers_to_transform = '0' is not supported"),
        ({"lora_alpha": float("nan")}, r"lora_alpha = nan is not supported: Input should be a finite number"),
        ({"lora_alpha": 10**400}, r"lora_alpha = 10+ is not supported"),
        ({"lora_alpha": 1e300}, r"weights of .*_proj, scaled by 3.3+\d?e\+299, are not finite as torch.float32"),
        ({"r": 4}, r"q_proj.lora_A must have shape \[4, 64\] by adapter_config.json and the model, got \[3, 64\]"),
        ({"lora_alpha": "7"}, r"lora_alpha = '7' is not supported: Input should be a valid number"),
        ({"target_modules": None}, r"target_modules = None is empty"),
        ({"target_modules": ["q_proj"]}, r"holds weights of .*v_proj, which target_modules = \['q_proj'\] does not"),
        ({"target_modules": ["q_proj", "v_proj", "o_proj"]}, r"lacks weights of .*o_proj, which .* means"),
        (
            {"layers_to_transform": [0], "layers_pattern": "layers"},
            r"holds weights of layers.1.*, which target_modules = .* does not target",
        ),
    ],
)
def test_what_is_not_computed_as_it_says_refuses_to_start(
    adapted: Adapted, bare: LanguageModel, tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(StartupError, match=rf"--adapters mine={tmp_path}/spoiled: .*{message}"):
        load_adapters([spoiled(adapted, tmp_path / "spoiled", **config)], bare)


KEYS = "base_model.model."


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("lm_head.lora_A.weight", "neither experts, embeddings, the output layer nor the vision tower"),
        ("embed_tokens.lora_embedding_A", "only linear layers of the language model's blocks"),
        ("visual.blocks.0.attn.qkv.lora_A.weight", "visual.blocks.0.attn.qkv.lora_A.weight; only linear layers"),
        ("layers.0.mlp.experts.0.gate_proj.lora_A.weight", "experts.0.gate_proj.lora_A.weight; only linear layers"),
        ("layers.9.self_attn.q_proj.lora_A.weight", "layers.9.self_attn.q_proj.lora_A.weight; only linear layers"),
        ("layers.0.self_attn.k_proj.lora_A.weight", "lora_A of layers.0.self_attn.k_proj but not its counterpart"),
        ("model.layers.0.self_attn.k_proj.lora_A.weight", r"layers of one model, it has \['', 'model.'\]"),
        ("layers.0.self_attn.q_proj.lora_magnitude_vector", "lora_magnitude_vector; only linear layers"),
    ],
)
def test_weights_of_anything_else_refuse_to_start(
    adapted: Adapted, bare: LanguageModel, tmp_path: Path, key: str, message: str
) -> None:
    folder = spoiled(adapted, tmp_path / "spoiled")
    rewrite(folder.path, lambda weights: weights.update({KEYS + key: torch.zeros(3, 64)}))
    with pytest.raises(StartupError, match=message):
        load_adapters([folder], bare)


@pytest.mark.parametrize("side", ["A", "B"])
def test_weights_that_are_not_finite_refuse_to_start(
    adapted: Adapted, bare: LanguageModel, tmp_path: Path, side: str
) -> None:
    folder, key = spoiled(adapted, tmp_path / "spoiled"), f"{KEYS}layers.1.self_attn.v_proj.lora_{side}.weight"
    rewrite(folder.path, lambda weights: weights[key].view(-1)[-1:].fill_(float("nan")))
    with pytest.raises(StartupError, match=r"weights of layers.1.self_attn.v_proj, .*, are not finite"):
        load_adapters([folder], bare)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("adapter_config.json", "the folder has no adapter_config.json"),
        ("adapter_model.safetensors", "has no adapter_model.safetensors; other formats are not supported"),
    ],
)
def test_a_folder_that_lacks_a_file_refuses_to_start_and_nothing_is_unpickled(
    adapted: Adapted, bare: LanguageModel, tmp_path: Path, missing: str, message: str
) -> None:
    folder = spoiled(adapted, tmp_path / "spoiled")
    torch.save(load_file(folder.path / "adapter_model.safetensors"), folder.path / "adapter_model.bin")
    (folder.path / missing).unlink()
    with pytest.raises(StartupError, match=message):
        load_adapters([folder], bare)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("adapter_config.json", b"{", "is no JSON object with a peft_type"),
        ("adapter_config.json", b"[]", "is no JSON object with a peft_type"),
        ("adapter_config.json", b'{"r": 8}', "is no JSON object with a peft_type"),
        ("adapter_config.json", b"[" * 100_000, "--adapters mine=.*maximum recursion depth exceeded"),
        ("adapter_model.safetensors", b"not weights", "cannot be read"),
    ],
)
def test_a_broken_file_refuses_to_start(
    adapted: Adapted, bare: LanguageModel, tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    folder = spoiled(adapted, tmp_path / "spoiled")
    (folder.path / name).write_bytes(content)
    with pytest.raises(StartupError, match=message):
        load_adapters([folder], bare)


def test_a_folder_that_cannot_be_read_refuses_to_start(bare: LanguageModel, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"--adapters mine=.*: \[Errno \d+\] File name too long"):
        load_adapters([AdapterFolder("mine", tmp_path / ("a" * 300))], bare)


def test_an_adapter_of_another_base_model_or_a_later_peft_loads_where_its_shapes_fit(
    adapted: Adapted, tmp_path: Path
) -> None:
    without_effect = {"base_model_name_or_path": "someone/else-7B", "fan_in_fan_out": True, "inference_mode": False}
    later = {"use_next_year": False, "next_year_config": None}
    model = engine_of(adapted.models.folder, spoiled(adapted, tmp_path / "other", **without_effect, **later))
    assert model.adapters.find("mine").name == "mine"


def test_a_model_takes_its_adapters_at_once(adapted: Adapted) -> None:
    with pytest.raises(AssertionError, match="the model has adapters already"):
        load_adapters([AdapterFolder("more", adapted.folder / "plain")], adapted.models.engine)


def test_without_peft_adapters_refuse_to_start_and_say_what_to_install(
    adapted: Adapted, bare: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    load_adapters([], bare)
    with pytest.raises(StartupError, match=r"needs PEFT, which is not installed: pip install 'framesieve\[lora\]'"):
        load_adapters([AdapterFolder("mine", adapted.folder / "plain")], bare)


def test_a_name_that_no_adapter_has_is_refused_with_those_there_are(adapted: Adapted) -> None:
    names = ", ".join(CONFIGS)
    with pytest.raises(InvalidRequest, match=rf"adapter must be one of {names}, got 'no-such'"):
        adapted.models.engine.adapters.find("no-such")
