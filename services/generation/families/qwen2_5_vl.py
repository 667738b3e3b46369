"""Qwen2.5-VL's language model: transformers' text class, with weights found by prefix.

Source: Qwen2.5-VL, arXiv 2502.13923; weight names of Qwen/Qwen2.5-VL-7B-Instruct and of transformers 5.
"""

from __future__ import annotations

import torch
from transformers import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLRotaryEmbedding,
    Qwen2_5_VLTextModel,
)

from common.checkpoint import Checkpoint
from services.generation.families.quantised import is_quantised, load_quantised
from services.generation.families.text_model import (
    fill,
    has_weights,
    make_text,
    read_weights,
    shard_text,
    with_output_layer,
)
from services.generation.model.language_model import LanguageModel
from services.generation.parallel.group import Group

# Published checkpoints use the second; transformers 5 writes the first if asked not to keep the original names.
TEXT_PREFIXES = ("model.language_model.", "model.")


def load(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, group: Group | None) -> LanguageModel:
    """The family's `load_language_model`."""
    config = Qwen2_5_VLConfig.from_pretrained(checkpoint.folder)
    if is_quantised(checkpoint):
        whole = Qwen2_5_VLForConditionalGeneration
        return load_quantised(checkpoint, config, whole, Qwen2_5_VLTextModel, 0, dtype, device, group)
    text = make_text(Qwen2_5_VLTextModel, Qwen2_5_VLRotaryEmbedding, config.text_config, device)
    prefix = next((each for each in TEXT_PREFIXES if has_weights(checkpoint, each)), TEXT_PREFIXES[-1])
    shards = shard_text(text, text.config.base_model_tp_plan, group)
    fill(text, read_weights(checkpoint, prefix, dtype, device, shards), prefix)
    style = Qwen2_5_VLForConditionalGeneration._tp_plan["lm_head"]
    return with_output_layer(checkpoint, config, text, 0, style, group)
