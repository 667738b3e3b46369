"""A model with adapters of every kind, the same as PEFT computes it, and changed copies of an adapter."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from common.checkpoint import Checkpoint
from services.generation.families import load_language_model
from services.generation.model.language_model import LanguageModel
from services.generation.settings import AdapterFolder
from services.generation.startup.adapter_files import load_adapters
from tests.adapters import write_adapter
from tests.tiny import Models, load_models

# Covers every field of LoraConfig that changes results. "whole" is trained on the whole model, the others on its text.
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "plain": {"r": 3, "lora_alpha": 7, "target_modules": ["q_proj", "v_proj"]},
    "every-linear": {"r": 2, "target_modules": "all-linear", "lora_dropout": 0.5},
    "patterns": {
        "r": 4,
        "lora_alpha": 5,
        "use_rslora": True,
        "target_modules": ["q_proj", "k_proj", "o_proj"],
        "rank_pattern": {"layers.1.self_attn.q_proj": 2, "o_proj": 6},
        "alpha_pattern": {r"layers\.[02]\..*k_proj": 11},
    },
    "some-layers": {
        "r": 3,
        "target_modules": ["q_proj", "v_proj", "o_proj"],
        "exclude_modules": ["layers.2.self_attn.o_proj"],
        "layers_to_transform": [0, 2],
        "layers_pattern": "layers",
    },
    "whole": {
        "r": 3,
        "lora_alpha": 9,
        "target_modules": r"model\.language_model\..*\.(q|k|v|o)_proj",
        "rank_pattern": {r"model\.language_model\.layers\.1\.self_attn\.k_proj": 5},
    },
}


@dataclass(frozen=True)
class Adapted:
    """A model with every adapter of CONFIGS; text: PEFT's text models, by adapter."""

    models: Models
    folder: Path
    text: Mapping[str, nn.Module]


def engine_of(folder: Path, *adapters: AdapterFolder) -> LanguageModel:
    model = load_language_model(Checkpoint(folder), torch.float32, torch.device("cpu"))
    load_adapters(adapters, model)
    return model


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    path = folder / "adapter_model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path)


def spoiled(adapted: Adapted, to: Path, **config: Any) -> AdapterFolder:
    shutil.copytree(adapted.folder / "plain", to)
    path = to / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return AdapterFolder("mine", to)


def load_adapted(family: str, folder: Path) -> Adapted:
    models = load_models(family, folder / "model")
    reference = models.reference
    text: dict[str, nn.Module] = {}
    for seed, (name, config) in enumerate(CONFIGS.items()):
        if name == "whole":
            text[name] = write_adapter(reference, folder / name, seed, **config).model.language_model
        else:
            text[name] = write_adapter(reference.model.language_model, folder / name, seed, **config)
    load_adapters([AdapterFolder(name, folder / name) for name in CONFIGS], models.engine)
    return Adapted(models, folder, text)
