"""Loads a language model by the classes and the prefixes of weights that a family's file names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from framesieve.common.checkpoint import Checkpoint
from framesieve.services.generation.loading.fp8 import keep_fp8
from framesieve.services.generation.loading.quantised import is_quantised, load_quantised
from framesieve.services.generation.loading.text_model import make_text, shard_text, with_output_layer
from framesieve.services.generation.loading.weights import fill, has_weights, read_weights
from framesieve.services.generation.model.language_model import LanguageModel
from framesieve.services.generation.parallel.group import Group


@dataclass(frozen=True, slots=True)
class TextClasses:
    """Transformers' classes: of the whole model, of its text model (or a subclass that adds no state), and of the text
    model's rotary embedding."""

    whole: Any
    text: Any
    rotary: Any


def load_text(
    checkpoint: Checkpoint,
    config: Any,
    classes: TextClasses,
    prefixes: Sequence[str],
    dtype: torch.dtype,
    device: torch.device,
    group: Group | None,
    *,
    embed_levels: int = 0,
    plan: Mapping[str, str] | None = None,
    change: Callable[[nn.Module, dict[str, Tensor]], None] = lambda text, weights: None,
) -> LanguageModel:
    """The language model of a checkpoint, or with a group this rank's part of it.

    config: of the whole model. prefixes: of the text model's weights, the first that the checkpoint has is used.
    plan: transformers' tensor-parallel plan, if the text config has none. change: of the weights that were read.
    """
    text = make_text(classes.text, classes.rotary, config.text_config, device)
    prefix = next((each for each in prefixes if has_weights(checkpoint, each)), prefixes[-1])
    in_fp8: dict[str, torch.dtype] = {}
    if is_quantised(checkpoint):
        in_fp8 = {} if group else keep_fp8(checkpoint, text, prefix, dtype, device)
        if not in_fp8:
            return load_quantised(checkpoint, config, classes.whole, classes.text, embed_levels, dtype, device, group)
    shards = shard_text(text, text.config.base_model_tp_plan or plan, group)
    weights = read_weights(checkpoint, prefix, dtype, device, shards, in_fp8)
    change(text, weights)
    fill(text, weights, prefix)
    del weights  # while layers are joined, both copies of all weights would be held
    return with_output_layer(checkpoint, config, text, embed_levels, classes.whole._tp_plan["lm_head"], group)
