"""The fixture `models` of the engine's tests. A test file names this module as its `pytest_plugins`."""

from __future__ import annotations

import pytest
import torch

from tests.tiny import Models, load_models


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    torch.set_num_threads(1)
    return load_models("qwen2_5_vl", tmp_path_factory.mktemp("tiny"))
