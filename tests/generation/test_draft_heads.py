"""EAGLE-3 heads and MTP are read from published layouts, and what is not supported is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.services.generation.loading.draft_head import draft_sizes, load_draft_head
from gridsieve.services.generation.loading.mtp import load_mtp
from tests.drafts import ANGELSLIM, ROPES, SPECFORGE, write_head, write_mtp
from tests.tiny import Models, load_models


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    torch.set_num_threads(1)
    return load_models("qwen2_5_vl", tmp_path_factory.mktemp("tiny"))


FAULTS: Mapping[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"architectures": ["LlamaForCausalLM"]}, "architectures must be one of"),
    "layers": ({"num_hidden_layers": 2}, "num_hidden_layers must be 1"),
    "width": ({"target_hidden_size": 8}, "target_hidden_size is 8"),
    "kind": ({"eagle_config": {"norm_before_fc": True}}, "norm_before_fc is not supported"),
    "rope": ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type 'yarn' is not supported"),
    "sections": ({"rope_scaling": {"mrope_section": [2, 2, 2]}}, r"mrope_section \[2, 2, 2\]"),
    "ids": ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}}, "names layers"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_head_that_is_not_supported_is_refused_by_name(models: Models, tmp_path: Path, fault: str) -> None:
    config, message = FAULTS[fault]
    folder = write_head(tmp_path, SPECFORGE, models.engine.hidden_size, models.engine.vocab_size)
    (folder / "config.json").write_text(json.dumps(Checkpoint(folder).config | config))
    with pytest.raises(StartupError, match=message):
        load_draft_head(Checkpoint(folder), models.engine)


def break_name(weights: dict[str, Tensor]) -> None:
    del weights["midlayer.hidden_norm.weight"]


def break_tokens(weights: dict[str, Tensor]) -> None:
    weights["d2t"][-1] = 10**6


@pytest.mark.parametrize(("fault", "message"), [(break_name, "missing weights"), (break_tokens, "d2t names tokens")])
def test_weights_that_are_not_the_heads_are_refused(
    models: Models, tmp_path: Path, fault: Callable[[dict[str, Tensor]], None], message: str
) -> None:
    folder = write_head(tmp_path, SPECFORGE, models.engine.hidden_size, models.engine.vocab_size)
    weights = load_file(folder / "model.safetensors")
    weights = {name: each.clone() for name, each in weights.items()}
    fault(weights)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(StartupError, match=message):
        load_draft_head(Checkpoint(folder), models.engine)


def test_mtp_that_is_not_there_or_not_supported_is_refused(models: Models, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"only models with the layers of Qwen3\.5"):
        load_mtp(Checkpoint(models.folder), models.engine)
    model = load_models("qwen3_5", tmp_path).engine
    with pytest.raises(StartupError, match=r"has no weights mtp\.\*"):
        load_mtp(Checkpoint(tmp_path), model)
    weights = load_file(write_mtp(tmp_path) / "mtp.safetensors")
    weights["mtp.layers.1.mlp.up_proj.weight"] = weights.pop("mtp.fc.weight").clone()
    save_file(weights, tmp_path / "mtp.safetensors")
    with pytest.raises(StartupError, match=r"missing weights \['mtp\.fc.*unknown weights \['mtp\.layers\.1\.mlp"):
        load_mtp(Checkpoint(tmp_path), model)


@pytest.mark.parametrize("where", ["eagle_config", ""])
def test_ids_of_layers_name_outputs_in_one_layout_and_inputs_in_the_other(models: Models, where: str) -> None:
    ids: dict[str, Any] = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    base = {"hidden_size": models.engine.hidden_size, "num_attention_heads": 6, "intermediate_size": 8, "head_dim": 16}
    for architecture, expected in ((SPECFORGE, (1, 2, 3)), (ANGELSLIM, (0, 1, 2))):
        rope = {"rope_scaling": ROPES[architecture]}
        config = base | rope | {"architectures": [architecture]} | ({where: ids} if where else ids)
        assert draft_sizes(config, models.engine).layers == expected


def test_a_head_with_its_own_embedding_reads_it(models: Models, tmp_path: Path) -> None:
    folder = write_head(tmp_path, SPECFORGE, models.engine.hidden_size, models.engine.vocab_size)
    for table, own in ((models.engine.embed_tokens.weight + 0, False), (models.engine.embed_tokens.weight + 1, True)):
        save_file({"embed_tokens.weight": table.detach().clone()}, folder / "embedding.safetensors")
        head = load_draft_head(Checkpoint(folder), models.engine)
        assert (head.embed_tokens is not None) == own
