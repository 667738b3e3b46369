"""The language model is transformers' own, read from a checkpoint that must be whole."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration

from common.checkpoint import Checkpoint
from common.errors import StartupError
from demo.checkpoint import TINY, write_checkpoint
from services.generation.families import load_language_model
from services.generation.families.language_model import LanguageModel
from services.generation.sampler import SamplingParams
from tests.oracle import Text
from tests.tiny import TinyEngine

CPU = torch.device("cpu")
PROMPT = Text((10, 11, 12, 13, 14))


def load(folder: Path, dtype: torch.dtype = torch.float32) -> LanguageModel:
    return load_language_model(Checkpoint(folder), dtype, CPU)


def copy(folder: Path, to: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    shutil.copytree(folder, to)
    weights = load_file(to / "model.safetensors")
    change(weights)
    save_file(weights, to / "model.safetensors", metadata={"format": "pt"})
    return to


def configure(folder: Path, to: Path, **text_config: Any) -> Path:
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    config["text_config"] |= text_config
    (to / "config.json").write_text(json.dumps(config))
    return to


def answer(model: LanguageModel) -> list[int]:
    engine = TinyEngine(model)
    asked = engine.ask("a", [PROMPT], SamplingParams(8))
    engine.drain()
    return asked.answer


@pytest.mark.parametrize("tied", [False, True])
def test_tied_and_untied_output_layers_answer_as_transformers_does(tmp_path: Path, tied: bool) -> None:
    folder = write_checkpoint(tmp_path / "model", replace(TINY, tie_word_embeddings=tied), seed=2)
    reference = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    prompt = torch.tensor([PROMPT.ids])
    generated = reference.generate(
        input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, eos_token_id=None, do_sample=False
    )
    assert answer(load(folder)) == generated[0, len(PROMPT.ids) :].tolist()


def test_both_spellings_of_key_names_load(tiny_checkpoint: Path, tmp_path: Path) -> None:
    def rename(weights: dict[str, Tensor]) -> None:
        for name in list(weights):
            if name.startswith("model."):
                weights["model.language_model." + name.removeprefix("model.")] = weights.pop(name)
            elif name.startswith("visual."):
                weights["model." + name] = weights.pop(name)

    renamed = copy(tiny_checkpoint, tmp_path / "renamed", rename)
    assert answer(load(renamed)) == answer(load(tiny_checkpoint))


@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
)
def test_a_missing_weight_refuses_to_start_and_is_named(tiny_checkpoint: Path, tmp_path: Path, name: str) -> None:
    broken = copy(tiny_checkpoint, tmp_path / "broken", lambda weights: weights.__delitem__(name))
    with pytest.raises(StartupError, match=f"missing weights .*{name}"):
        load(broken)


def test_a_weight_of_another_shape_refuses_to_start(tiny_checkpoint: Path, tmp_path: Path) -> None:
    broken = copy(
        tiny_checkpoint, tmp_path / "broken", lambda weights: weights.update({"model.norm.weight": torch.zeros(3)})
    )
    with pytest.raises(StartupError, match=r"wants model\.norm\.weight \[64\], it is \[3\]"):
        load(broken)


def test_a_layer_that_the_config_does_not_have_refuses_to_start(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"unknown weights .*model\.layers\.2"):
        load(configure(tiny_checkpoint, tmp_path / "short", num_hidden_layers=2, layer_types=["full_attention"] * 2))


@pytest.mark.parametrize(
    ("text_config", "message"),
    [
        ({"use_sliding_window": True}, "sliding window"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "'dynamic' is not supported"),
    ],
)
def test_what_the_engine_cannot_compute_refuses_to_start(
    tiny_checkpoint: Path, tmp_path: Path, text_config: dict[str, Any], message: str
) -> None:
    with pytest.raises(StartupError, match=message):
        load(configure(tiny_checkpoint, tmp_path / "other", **text_config))


def test_bfloat16_runs_with_float32_logits(tiny_checkpoint: Path) -> None:
    model = load(tiny_checkpoint, torch.bfloat16)
    assert {parameter.dtype for parameter in model.text.parameters()} == {torch.bfloat16}
    engine = TinyEngine(model)
    engine.ask("a", [PROMPT], SamplingParams(2))
    engine.drain()
    assert engine.runner.logits["a"][0].dtype == torch.float32
