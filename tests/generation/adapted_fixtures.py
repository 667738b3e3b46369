"""The model of each family with adapters, as a fixture.

A file that uses it names this one as its `pytest_plugins`.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from services.generation.settings import AdapterFolder
from services.generation.startup.adapter_files import load_adapters
from tests.adapters import write_adapter
from tests.generation.adapted_models import CONFIGS, Adapted
from tests.tiny import load_models


@pytest.fixture(scope="module")
def adapted(family: str, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp(family)
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
