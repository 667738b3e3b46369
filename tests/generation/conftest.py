"""The model that most tests of the engine use."""

from __future__ import annotations

import pytest
import torch

from tests.tiny import Models, load_models


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    torch.set_num_threads(1)
    return load_models("qwen2_5_vl", tmp_path_factory.mktemp("tiny"))
