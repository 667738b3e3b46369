"""The registry of model families by model type. A new family is a new file and a line here."""

from __future__ import annotations

import torch
from transformers import AutoConfig

from framesieve.common.checkpoint import Checkpoint
from framesieve.services.generation.families import (
    internvl,
    llava,
    llava_next_video,
    llava_onevision,
    minicpmv,
    mistral3,
    qwen2_5_vl,
    qwen2_vl,
    qwen3_vl,
)
from framesieve.services.generation.model.language_model import LanguageModel
from framesieve.services.generation.parallel.group import Group
from framesieve.services.generation.parallel.sharding import check_sizes

FAMILIES = {
    "internvl": internvl.load,
    "llava": llava.load,
    "llava_next_video": llava_next_video.load,
    "llava_onevision": llava_onevision.load,
    "minicpmv": minicpmv.load,
    "mistral3": mistral3.load,
    "qwen2_vl": qwen2_vl.load,
    "qwen2_5_vl": qwen2_5_vl.load,
    "qwen3_vl": qwen3_vl.load,
    "qwen3_vl_moe": qwen3_vl.load_moe,
}


def check_ranks(checkpoint: Checkpoint, ranks: int) -> None:
    """Raises StartupError if a checkpoint's language model cannot be divided among `ranks` ranks."""
    checkpoint.pick(FAMILIES)
    flat = checkpoint.model_type == "minicpmv"
    text = minicpmv.text_config(checkpoint) if flat else checkpoint.config_as(AutoConfig).get_text_config()
    check_sizes(text, ranks)


def load_language_model(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, group: Group | None = None
) -> LanguageModel:
    """A checkpoint's language model, or with a group this rank's part of it.

    Raises StartupError for an unsupported model type, missing or unknown weights, attention features that the engine
    does not support, and heads that cannot be divided among the ranks.
    """
    return checkpoint.pick(FAMILIES)(checkpoint, dtype, device, group)
