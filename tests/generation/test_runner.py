"""The language model computes what transformers computes, from a checkpoint that must be complete."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.checkpoint import Checkpoint
from common.contract.errors import StartupError
from services.generation.families import load_language_model
from services.generation.model.language_model import LanguageModel
from services.generation.sampling.sampler import SamplingParams
from tests.families import FAMILIES, load_reference, write_qwen3_vl_moe
from tests.oracle import Item, Text
from tests.tiny import TinyEngine

CPU = torch.device("cpu")
EXPERTS = [f"model.language_model.layers.1.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
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


def name_in(family: str, name: str) -> str:
    return FAMILIES[family].text_prefix + name


def answer_of_transformers(family: str, folder: Path) -> list[int]:
    prompt = torch.tensor([PROMPT.ids])
    generated = load_reference(family, folder).generate(
        input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, eos_token_id=None, do_sample=False
    )
    ids: list[int] = generated[0, len(PROMPT.ids) :].tolist()
    return ids


def answer(model: LanguageModel) -> list[int]:
    engine = TinyEngine(model)
    asked = engine.ask("a", [PROMPT], SamplingParams(8))
    engine.drain()
    return asked.answer


def test_a_tied_output_layer_answers_as_in_transformers(family: str, family_checkpoint: Path, tmp_path: Path) -> None:
    folder = copy(family_checkpoint, tmp_path / "tied", lambda weights: weights.__delitem__("lm_head.weight"))
    config = json.loads((folder / "config.json").read_text())
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = True
    (folder / "config.json").write_text(json.dumps(config))
    assert answer(load(folder)) == answer_of_transformers(family, folder)


def test_both_spellings_of_key_names_load(tiny_checkpoint: Path, tmp_path: Path) -> None:
    def rename(weights: dict[str, Tensor]) -> None:
        for name in list(weights):
            if name.startswith("model."):
                weights["model.language_model." + name.removeprefix("model.")] = weights.pop(name)
            elif name.startswith("visual."):
                weights["model." + name] = weights.pop(name)

    renamed = copy(tiny_checkpoint, tmp_path / "renamed", rename)
    assert answer(load(renamed)) == answer(load(tiny_checkpoint))


# Of the two matrices of an expert the first is square at 32, the second at 64: the shape of the other shows the order.
@pytest.mark.parametrize("moe_intermediate", [32, 64])
def test_experts_load_as_transformers_writes_them_and_with_swapped_axes_as_published(
    tmp_path: Path, moe_intermediate: int
) -> None:
    written = write_qwen3_vl_moe(tmp_path / "written", 1, moe_intermediate)

    def swap(weights: dict[str, Tensor]) -> None:
        for name in [each for each in weights if each.endswith(("gate_up_proj", "down_proj")) and "experts" in each]:
            weights[name] = weights[name].transpose(1, 2).contiguous()

    swapped = copy(written, tmp_path / "swapped", swap)
    shapes = [
        [load_file(folder / "model.safetensors")[name].shape for name in EXPERTS] for folder in (written, swapped)
    ]
    assert shapes[0] != shapes[1]
    for folder in (written, swapped):
        assert answer(load(folder)) == answer_of_transformers("qwen3_vl_moe", folder)


def test_experts_have_the_implementation_that_transformers_selects(tmp_path: Path) -> None:
    """In a process of its own, because in this one transformers' own classes have already made the selection."""
    folder = FAMILIES["qwen3_vl_moe"].write(tmp_path, 1)
    program = f"""
import torch
from pathlib import Path
from common.checkpoint import Checkpoint
from services.generation.families import load_language_model
model = load_language_model(Checkpoint(Path({str(folder)!r})), torch.float32, torch.device("cpu"))
print(model.text.config._experts_implementation)
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    expected = load_reference("qwen3_vl_moe", folder).config.text_config._experts_implementation
    assert found.stdout.strip() == expected, found.stderr


@pytest.mark.parametrize("axes", [(3,), (4, 5, 6)])
def test_experts_of_a_wrong_shape_are_a_startup_error(tmp_path: Path, axes: tuple[int, ...]) -> None:
    written = FAMILIES["qwen3_vl_moe"].write(tmp_path / "written", 1)
    broken = copy(written, tmp_path / "broken", lambda weights: weights.update({EXPERTS[0]: torch.zeros(axes)}))
    with pytest.raises(StartupError, match=re.escape(f"expects {EXPERTS[0]} [4, 96, 64], got {list(axes)}")):
        load(broken)


@pytest.mark.parametrize("name", ["layers.1.self_attn.q_proj.weight", "lm_head.weight"])
def test_a_missing_weight_is_a_startup_error_that_names_it(
    family: str, family_checkpoint: Path, tmp_path: Path, name: str
) -> None:
    full = name if name.startswith("lm_head") else name_in(family, name)
    broken = copy(family_checkpoint, tmp_path / "broken", lambda weights: weights.__delitem__(full))
    with pytest.raises(StartupError, match=f"missing weights .*{re.escape(full)}"):
        load(broken)


def test_a_weight_of_a_wrong_shape_is_a_startup_error(family: str, family_checkpoint: Path, tmp_path: Path) -> None:
    norm = name_in(family, "norm.weight")
    broken = copy(family_checkpoint, tmp_path / "broken", lambda weights: weights.update({norm: torch.zeros(3)}))
    with pytest.raises(StartupError, match=re.escape(f"expects {norm} [64], got [3]")):
        load(broken)


def test_weights_of_a_layer_beyond_the_config_are_a_startup_error(
    family: str, family_checkpoint: Path, tmp_path: Path
) -> None:
    short = configure(family_checkpoint, tmp_path / "short", num_hidden_layers=2, layer_types=["full_attention"] * 2)
    with pytest.raises(StartupError, match=f"unknown weights .*{re.escape(name_in(family, 'layers.2'))}"):
        load(short)


@pytest.mark.parametrize(
    ("text_config", "message"),
    [
        ({"use_sliding_window": True}, "text_config.use_sliding_window: sliding window"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "'dynamic' is not supported"),
    ],
)
def test_an_unsupported_text_config_is_a_startup_error(
    family_checkpoint: Path, tmp_path: Path, text_config: dict[str, Any], message: str
) -> None:
    with pytest.raises(StartupError, match=message):
        load(configure(family_checkpoint, tmp_path / "other", **text_config))


def test_deepstack_levels_are_passed_only_with_the_rows_that_have_them(family: str, family_checkpoint: Path) -> None:
    levels = FAMILIES[family].levels
    model = load(family_checkpoint)
    seen: list[tuple[int, list[int], list[int]]] = []

    def watch(text: object, args: object, called_with: dict[str, Any]) -> None:
        tokens = called_with["inputs_embeds"].shape[1]
        if "visual_pos_masks" in called_with:
            rows, features = called_with["visual_pos_masks"], called_with["deepstack_visual_embeds"]
            seen.append((tokens, rows.tolist(), list(features.shape)))
        else:
            seen.append((tokens, [], []))

    model.text.register_forward_pre_hook(watch, with_kwargs=True)
    engine = TinyEngine(model, max_num_batched_tokens=4)
    picture = Item(1, 1, 3, None, *np.zeros((1, 3, 64), np.float32), deepstack=(np.ones((3, 64), np.float32),) * levels)
    asked = engine.ask("a", [PROMPT, picture, Text((15, 16))], SamplingParams(2))
    engine.deliver(asked, 0, picture, [0, 1, 2])
    engine.drain()
    windows = [(4, []), (4, [1, 2, 3]), (2, []), (1, [])]
    expected = [(tokens, rows, [levels, 3, 64]) if rows and levels else (tokens, [], []) for tokens, rows in windows]
    assert seen == expected


def test_bfloat16_runs_with_float32_logits(family_checkpoint: Path) -> None:
    model = load(family_checkpoint, torch.bfloat16)
    assert {parameter.dtype for parameter in model.text.parameters()} == {torch.bfloat16}
    engine = TinyEngine(model)
    engine.ask("a", [PROMPT], SamplingParams(2))
    engine.drain()
    assert engine.runner.logits["a"][0].dtype == torch.float32
