"""The registry of model families by model type. A new family is a file and a line here, or a line in llava.py."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.common.contract.retention import Pruning
from gridsieve.services.generation.families import (
    cosmos3_edge,
    glm,
    llava,
    minicpmv,
    minicpmv4_6,
    nemotron_h_omni,
    qwen2_5_vl,
    qwen2_vl,
    qwen3_5,
    qwen3_vl,
)
from gridsieve.services.generation.loading import TextFamily, load
from gridsieve.services.generation.model.language_model import LanguageModel
from gridsieve.services.generation.parallel.group import Group
from gridsieve.services.generation.parallel.sharding import check_sizes

FAMILIES: Mapping[str, TextFamily] = {
    **llava.FAMILIES,
    "NemotronH_Nano_VL_V2": nemotron_h_omni.NANO_VL_FAMILY,
    "cosmos3_edge": cosmos3_edge.FAMILY,
    "glm4v": glm.GLM4V_FAMILY,
    "glm4v_moe": glm.GLM4V_MOE_FAMILY,
    "glm46v": glm.GLM46V_FAMILY,
    "minicpmv": minicpmv.FAMILY,
    "minicpmv4_6": minicpmv4_6.FAMILY,
    "minicpmv4_7": minicpmv4_6.CANVAS_FAMILY,
    "nemotron_h_omni": nemotron_h_omni.FAMILY,
    "qwen2_vl": qwen2_vl.FAMILY,
    "qwen2_5_vl": qwen2_5_vl.FAMILY,
    "qwen3_5": qwen3_5.FAMILY,
    "qwen3_5_moe": qwen3_5.MOE_FAMILY,
    "qwen3_vl": qwen3_vl.FAMILY,
    "qwen3_vl_moe": qwen3_vl.MOE_FAMILY,
}

NOT_LIVE = (
    f"live sessions are served for the model types {', '.join(name for name, each in FAMILIES.items() if each.live)}, "
    f"not for this model"
)


def check_ranks(checkpoint: Checkpoint, ranks: int) -> None:
    """Raises StartupError if a checkpoint's language model cannot be divided among `ranks` ranks."""
    check_sizes(checkpoint.pick(FAMILIES).config(checkpoint).text_config, ranks)


def check_pruning(checkpoint: Checkpoint, pruning: Pruning) -> None:
    """Raises StartupError if the encoder would refuse every request whose videos are pruned so."""
    family = checkpoint.pick(FAMILIES)
    if pruning.drops and pruning.method not in family.pruning_methods:
        threshold = "" if pruning.threshold is None else f" and --pruning-threshold {pruning.threshold:g}"
        raise StartupError(
            f"--pruning-method {pruning.method} at --pruning-rate {pruning.rate:g}{threshold}: must be one of "
            f"{', '.join(family.pruning_methods)} for this model: {family.why_not_all}"
        )


def load_language_model(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    group: Group | None = None,
    in_int4: bool = False,
) -> LanguageModel:
    """A checkpoint's language model, or with a group this rank's part of it. in_int4: see `load`.

    Raises StartupError for an unsupported model type, missing or unknown weights, attention features that the engine
    does not support, and heads that cannot be divided among the ranks.
    """
    return load(checkpoint.pick(FAMILIES), checkpoint, dtype, device, group, in_int4)
