"""Qwen2.5-VL's language model. Source: arXiv 2502.13923; weight names of Qwen/Qwen2.5-VL-7B-Instruct."""

from __future__ import annotations

import torch
from transformers import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLRotaryEmbedding,
    Qwen2_5_VLTextModel,
)

from framesieve.common.checkpoint import Checkpoint
from framesieve.services.generation.families.qwen2_vl import TEXT_PREFIXES
from framesieve.services.generation.loading import TextClasses, load_text
from framesieve.services.generation.model.language_model import LanguageModel
from framesieve.services.generation.parallel.group import Group

_CLASSES = TextClasses(Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLTextModel, Qwen2_5_VLRotaryEmbedding)


def load(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, group: Group | None) -> LanguageModel:
    """The family's `load_language_model`."""
    config = Qwen2_5_VLConfig.from_pretrained(checkpoint.folder)
    return load_text(checkpoint, config, _CLASSES, TEXT_PREFIXES, dtype, device, group)
