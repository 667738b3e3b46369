"""Loads the language model of a checkpoint, by the module of its family that `gridsieve.families` names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.families import family_of
from gridsieve.services.generation.loading.experts import (
    is_quantised_expert,
    stacked_shards,
    unstack,
    without_others,
)
from gridsieve.services.generation.loading.fp8 import RoundedToFp8, keep_fp8
from gridsieve.services.generation.loading.fp8_blocks import fp8_blocks
from gridsieve.services.generation.loading.int4 import Int4Layers, int4_format
from gridsieve.services.generation.loading.quantised import TEXT_OF_WHOLE, load_quantised
from gridsieve.services.generation.loading.quantization_config import Quantization, is_quantised
from gridsieve.services.generation.loading.reading import reader_of
from gridsieve.services.generation.loading.text_family import StoredVectors, TextFamily
from gridsieve.services.generation.loading.text_model import (
    assemble,
    in_float32,
    make_text,
    read_output_layer,
    shard_text,
)
from gridsieve.services.generation.loading.weights import fill, has_weights, read_weights, stored_weights
from gridsieve.services.generation.model.language_model import LanguageModel
from gridsieve.services.generation.parallel.group import Group
from gridsieve.services.generation.parallel.sharding import WHOLE_OUTPUT, check_sizes, layers_plan


def check_ranks(checkpoint: Checkpoint, ranks: int) -> None:
    """Raises StartupError if a checkpoint's language model cannot be divided among `ranks` ranks."""
    whole_experts = any(is_quantised_expert(name) for name, _, _ in stored_weights(checkpoint, ""))
    check_sizes(_family(checkpoint).config(checkpoint).text_config, ranks, whole_experts)


def load_language_model(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    group: Group | None = None,
    quantization: Quantization = "none",
) -> LanguageModel:
    """A checkpoint's language model, or with a group, whose size has passed `check_ranks`, this rank's part of it.

    quantization: the format to which linear layers are rounded. Layers stored in 4 bits stay in 4 bits.
    Raises StartupError for an unsupported model type, missing or unknown weights, and attention features that the
    engine does not support.
    """
    family = _family(checkpoint)
    model = _load(family, checkpoint, dtype, device, group, quantization)
    model = replace(model, position_axes=family.position_axes, clock_times=family.clock_times)
    if checkpoint.task != "generate":
        model = reader_of(checkpoint, family, model)
    if not family.stored:
        return model
    config = family.config(checkpoint)
    return model.with_stored(torch.cat([_vectors(each, checkpoint, config, model.dtype) for each in family.stored]))


def _family(checkpoint: Checkpoint) -> TextFamily:
    found: TextFamily = family_of(checkpoint).load("text")
    return found


def _vectors(stored: StoredVectors, checkpoint: Checkpoint, config: Any, dtype: torch.dtype) -> Tensor:
    """On the host, [n, D]: the weight may have many more rows."""
    for name in stored.names:
        if found := read_weights(checkpoint, name, dtype, torch.device("cpu"), {}):
            return found[""].view(-1, found[""].shape[-1])[stored.rows(config)]
    raise StartupError(f"missing weights ['{stored.names[-1]}']")


def _load(
    family: TextFamily,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    group: Group | None,
    quantization: Quantization,
) -> LanguageModel:
    config = family.config(checkpoint)
    classes, embed_levels = family.classes(config), family.embed_levels(config)
    text = make_text(classes.text, classes.rotary, config.text_config, device)
    prefix = next((each for each in family.prefixes if has_weights(checkpoint, each)), family.prefixes[-1])
    named, how = family.named(config), int4_format(checkpoint, quantization == "int4")
    in_fp8: dict[str, torch.dtype] = {}
    blocks, plan = fp8_blocks(checkpoint), text.config.base_model_tp_plan or {}
    # A plan of the embedding alone is none: transformers gives dense models of Qwen3-VL such a one.
    plan = plan if any(name.startswith("layers.") for name in plan) else family.plan
    if quantization == "fp8":
        _check_rounding(checkpoint, group)
    if is_quantised(checkpoint) and how is None:
        expanded = layers_plan(text, plan, group.ranks) if group else {}
        in_fp8 = keep_fp8(checkpoint, text, prefix, dtype, device, group, expanded)
        named = without_others(text, named)
        if not blocks.scales:
            if group is not None:
                raise StartupError(
                    f"--tensor-parallel {group.ranks}: checkpoints that transformers dequantises support one rank only"
                )
            _refuse_experts(checkpoint, prefix)
            if TEXT_OF_WHOLE not in family.prefixes:
                raise StartupError(
                    f"quantised checkpoints of {checkpoint.model_type} are not supported, except in 4 bits, and in "
                    f"fp8 by blocks"
                )
            return load_quantised(checkpoint, config, classes.whole, classes.text, embed_levels, dtype, device)
    layers = None if how is None else Int4Layers(checkpoint, text, prefix, how, named, group)
    shards = shard_text(text, plan, group) | stacked_shards(text, in_fp8)
    if layers is not None:
        layers.pack(dtype, device, shards)
        named = layers.others
    dtypes = in_float32(text, dtype) | in_fp8
    rounding = {"rounded": RoundedToFp8(text, dtype, device).rounded} if quantization == "fp8" else {}
    weights = read_weights(checkpoint, prefix, dtype, device, shards, dtypes, named, **rounding)
    family.change(text, weights)
    unstack(text, weights, blocks.scale)
    fill(text, weights, prefix)
    del weights  # while layers are joined, both copies of all weights would be held
    style = (classes.whole._tp_plan or {}).get("lm_head", WHOLE_OUTPUT)
    lm_head = read_output_layer(checkpoint, config, text.embed_tokens.weight, how, style, group)
    return assemble(config, text, lm_head, embed_levels, group.ranks if group else 1)


def _refuse_experts(checkpoint: Checkpoint, prefix: str) -> None:
    """Raises StartupError, by name, for quantised experts: transformers reads some of them otherwise than they are."""
    for full, _, _ in stored_weights(checkpoint, prefix):
        if is_quantised_expert(full):
            raise StartupError(
                f"{full}: experts in this layout are not supported, only in 4 bits, and in fp8 by blocks, rows or "
                f"matrices"
            )


def _check_rounding(checkpoint: Checkpoint, group: Group | None) -> None:
    if is_quantised(checkpoint):
        raise StartupError("--quantization fp8: the checkpoint is quantised already")
    if group is not None:
        raise StartupError(f"--quantization fp8: --tensor-parallel must be 1, got {group.ranks}")
