"""Qwen2-VL's language model. Source: arXiv 2409.12191; weight names of Qwen/Qwen2-VL-7B-Instruct."""

from __future__ import annotations

import torch
from transformers import Qwen2VLConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import (
    Qwen2VLForConditionalGeneration,
    Qwen2VLRotaryEmbedding,
    Qwen2VLTextModel,
)

from framesieve.common.checkpoint import Checkpoint
from framesieve.services.generation.loading import TextClasses, load_text
from framesieve.services.generation.model.language_model import LanguageModel
from framesieve.services.generation.parallel.group import Group

# Published checkpoints use the second; transformers 5 writes the first if asked not to keep the original names.
TEXT_PREFIXES = ("model.language_model.", "model.")
_CLASSES = TextClasses(Qwen2VLForConditionalGeneration, Qwen2VLTextModel, Qwen2VLRotaryEmbedding)


def load(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, group: Group | None) -> LanguageModel:
    """The family's `load_language_model`."""
    config = Qwen2VLConfig.from_pretrained(checkpoint.folder)
    return load_text(checkpoint, config, _CLASSES, TEXT_PREFIXES, dtype, device, group)
