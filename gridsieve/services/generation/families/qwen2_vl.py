"""Qwen2-VL's language model. Source: arXiv 2409.12191; weight names of Qwen/Qwen2-VL-7B-Instruct."""

from __future__ import annotations

from transformers import Qwen2VLConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import (
    Qwen2VLForConditionalGeneration,
    Qwen2VLRotaryEmbedding,
    Qwen2VLTextModel,
)

from gridsieve.common.contract.retention import METHODS
from gridsieve.services.generation.loading import TextClasses, TextFamily

# Published checkpoints use the second; transformers 5 writes the first if asked not to keep the original names.
TEXT_PREFIXES = ("model.language_model.", "model.")
_CLASSES = TextClasses(Qwen2VLForConditionalGeneration, Qwen2VLTextModel, Qwen2VLRotaryEmbedding)
FAMILY = TextFamily(
    lambda checkpoint: checkpoint.config_as(Qwen2VLConfig), lambda _: _CLASSES, TEXT_PREFIXES, pruning_methods=METHODS
)
