"""Loads the language model of a checkpoint, by what its family says of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.common.contract.retention import AFTER_TOWER, WHY_NOT_BEFORE
from gridsieve.services.generation.loading.fp8 import keep_fp8
from gridsieve.services.generation.loading.fp8_blocks import fp8_blocks
from gridsieve.services.generation.loading.int4 import Int4Layers, int4_format
from gridsieve.services.generation.loading.quantised import TEXT_OF_WHOLE, load_quantised
from gridsieve.services.generation.loading.quantization_config import is_quantised
from gridsieve.services.generation.loading.text_model import in_float32, make_text, shard_text, with_output_layer
from gridsieve.services.generation.loading.weights import Named, as_stored, fill, has_weights, read_weights
from gridsieve.services.generation.model.language_model import LanguageModel
from gridsieve.services.generation.parallel.group import Group
from gridsieve.services.generation.parallel.sharding import WHOLE_OUTPUT


@dataclass(frozen=True, slots=True)
class TextClasses:
    """Transformers' classes: of the whole model, of its text model (or a subclass that adds no state), and of the text
    model's rotary embedding; None if it has none."""

    whole: Any
    text: Any
    rotary: Any


@dataclass(frozen=True, slots=True)
class TextFamily:
    """How the language models of one family differ from those of others.

    config: reads the config of the whole model. Raises StartupError for what the family does not support.
    classes: for a config.
    prefixes: of the text model's weights; the first that the checkpoint has is used.
    position_axes: see `LanguageModel`.
    embed_levels: for a config, see `LanguageModel`.
    stored: names of a vector that prompts name by the id after the vocabulary's last; the first that the checkpoint has
        is read. Empty if there is none.
    plan: transformers' tensor-parallel plan, if the text config has none.
    named: for a config, maps a stored name after the prefix to the text model's.
    change: changes the weights that were read to those that the text model takes.
    pruning_methods, why_not_all: those that the encoder takes for videos of the family, and why no others.
    live: whether its videos can be served in live sessions: slices of two frames, each with a grid of its own.
    """

    config: Callable[[Checkpoint], Any]
    classes: Callable[[Any], TextClasses]
    prefixes: Sequence[str]
    position_axes: int = 3
    embed_levels: Callable[[Any], int] = lambda config: 0
    stored: Sequence[str] = ()
    plan: Mapping[str, str] | None = None
    named: Callable[[Any], Named] = lambda config: as_stored
    change: Callable[[nn.Module, dict[str, Tensor]], None] = lambda text, weights: None
    pruning_methods: Sequence[str] = AFTER_TOWER
    why_not_all: str = WHY_NOT_BEFORE
    live: bool = False


def load(
    family: TextFamily,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    group: Group | None,
    in_int4: bool = False,
) -> LanguageModel:
    """The language model of a checkpoint, or with a group this rank's part of it.

    in_int4: linear layers are rounded to 4 bits; those that are stored in 4 bits stay so anyhow.
    Raises StartupError for missing or unknown weights, and for what the family or the engine does not support.
    """
    model = _load(family, checkpoint, dtype, device, group, in_int4)
    model = replace(model, position_axes=family.position_axes)
    if not family.stored:
        return model
    for name in family.stored:
        if vector := read_weights(checkpoint, name, model.dtype, device, {}):
            return model.with_stored(vector[""])
    raise StartupError(f"missing weights ['{family.stored[-1]}']")


def _load(
    family: TextFamily,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    group: Group | None,
    in_int4: bool,
) -> LanguageModel:
    config = family.config(checkpoint)
    classes, embed_levels = family.classes(config), family.embed_levels(config)
    text = make_text(classes.text, classes.rotary, config.text_config, device)
    prefix = next((each for each in family.prefixes if has_weights(checkpoint, each)), family.prefixes[-1])
    named, how = family.named(config), int4_format(checkpoint, in_int4)
    in_fp8: dict[str, torch.dtype] = {}
    if is_quantised(checkpoint) and how is None:
        if group is not None:
            raise StartupError(f"--tensor-parallel {group.ranks}: quantised checkpoints support one rank only")
        in_fp8 = keep_fp8(checkpoint, text, prefix, dtype, device)
        if not in_fp8 and not fp8_blocks(checkpoint).scales:
            if TEXT_OF_WHOLE not in family.prefixes:
                raise StartupError(
                    f"quantised checkpoints of {checkpoint.model_type} are not supported, except in 4 bits, and in "
                    f"fp8 by blocks"
                )
            return load_quantised(checkpoint, config, classes.whole, classes.text, embed_levels, dtype, device)
    layers = None if how is None else Int4Layers(checkpoint, text, prefix, how, named)
    shards = shard_text(text, text.config.base_model_tp_plan or family.plan, group)
    if layers is not None:
        layers.pack(dtype, device, shards)
        named = layers.others
    dtypes = in_float32(text, dtype) | in_fp8
    weights = read_weights(checkpoint, prefix, dtype, device, shards, dtypes, named)
    family.change(text, weights)
    fill(text, weights, prefix)
    del weights  # while layers are joined, both copies of all weights would be held
    style = (classes.whole._tp_plan or {}).get("lm_head", WHOLE_OUTPUT)
    return with_output_layer(checkpoint, config, text, embed_levels, style, group, how)
