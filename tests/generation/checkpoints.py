"""Changed copies of checkpoints, and pairs of a quantised and a plain one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.services.generation.loading import load_language_model
from gridsieve.services.generation.model.language_model import LanguageModel
from tests.families import FAMILIES, load_reference
from tests.tiny import Models

FP8_MOST = 448.0


def changed(
    folder: Path,
    to: Path,
    weights: Callable[[dict[str, Tensor]], object] = id,
    text_config: dict[str, Any] | None = None,
    **config: Any,
) -> Path:
    """A copy of a checkpoint.

    weights: changes them in place. text_config, config: fields to set; a flat config takes both.
    """
    shutil.copytree(folder, to)
    held = load_file(to / "model.safetensors")
    weights(held)
    save_file(held, to / "model.safetensors", metadata={"format": "pt"})
    written = json.loads((to / "config.json").read_text()) | config
    of_text = written.get("text_config") or written.get("llm_config") or written
    of_text.update(text_config or {})
    (to / "config.json").write_text(json.dumps(written))
    return to


def tied(folder: Path, to: Path) -> Path:
    """A copy whose output layer is its embeddings."""
    tie = {"tie_word_embeddings": True}

    def drop_output_layer(weights: dict[str, Tensor]) -> None:
        del weights[next(name for name in weights if name.endswith("lm_head.weight"))]

    return changed(folder, to, drop_output_layer, tie, **tie)


def with_swapped_experts(folder: Path, to: Path) -> Path:
    """A copy whose experts have their last two axes swapped, as published checkpoints store them."""

    def swap(weights: dict[str, Tensor]) -> None:
        for name in [each for each in weights if ".experts." in each]:
            weights[name] = weights[name].mT.contiguous()

    return changed(folder, to, swap)


@dataclass(frozen=True)
class Twins:
    """A quantised checkpoint and its dequantised twin. models: of the twin. weights: that the first one stores."""

    quantised: Path
    plain: Path
    models: Models
    weights: dict[str, Tensor]


def load(folder: Path, dtype: torch.dtype = torch.float32) -> LanguageModel:
    return load_language_model(Checkpoint(folder), dtype, torch.device("cpu"))


def fp8_twins(family: str, written: Path, folder: Path, block: int) -> Twins:
    """Of a checkpoint, with a scale for each block of a side of `block`."""
    prefix, weights = FAMILIES[family].text_prefix, load_file(written / "model.safetensors")
    plain, quantised = dict(weights), dict(weights)
    for name, weight in weights.items():
        if name.startswith(prefix) and name.removesuffix(".weight").endswith("_proj"):
            stored, plain[name] = in_fp8(name, weight, block)
            quantised |= stored
    assert len(quantised) > len(plain)
    config = fp8_config(block)
    changed(written, folder / "plain", lambda held: held.update(plain))
    changed(written, folder / "quantised", lambda held: held.update(quantised), quantization_config=config)
    engine, reference = load(folder / "plain"), load_reference(family, folder / "plain")
    models = Models(folder / "plain", replace(FAMILIES[family], hidden=engine.hidden_size), engine, reference)
    return Twins(folder / "quantised", folder / "plain", models, quantised)


def fp8_config(block: int) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "weight_block_size": [block, block],
        "activation_scheme": "dynamic",
        "modules_to_not_convert": ["visual", "model.visual", "lm_head"],
    }


def in_fp8(name: str, weight: Tensor, block: int) -> tuple[dict[str, Tensor], Tensor]:
    """A scale for each block of a side of `block`, the last ones of an axis smaller where it is no multiple.

    Returns the tensors to store and the dequantised weight.
    """
    row, column = (torch.arange(size) // block for size in weight.shape[-2:])
    largest = [
        [weight[..., row == above, :][..., column == left].abs().amax((-2, -1)) for left in column.unique()]
        for above in row.unique()
    ]
    scale = torch.stack([torch.stack(each, -1) for each in largest], -2) / FP8_MOST
    of_each = scale[..., row, :][..., column]
    rounded = (weight / of_each).to(torch.float8_e4m3fn)
    return {name: rounded, f"{name}_scale_inv": scale}, rounded.float() * of_each
