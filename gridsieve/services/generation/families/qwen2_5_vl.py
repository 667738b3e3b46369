"""Qwen2.5-VL's language model. Source: arXiv 2502.13923; weight names of Qwen/Qwen2.5-VL-7B-Instruct."""

from __future__ import annotations

from transformers import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLRotaryEmbedding,
    Qwen2_5_VLTextModel,
)

from gridsieve.common.contract.retention import METHODS
from gridsieve.services.generation.families.qwen2_vl import TEXT_PREFIXES
from gridsieve.services.generation.loading import TextClasses, TextFamily

_CLASSES = TextClasses(Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLTextModel, Qwen2_5_VLRotaryEmbedding)
FAMILY = TextFamily(
    lambda checkpoint: checkpoint.config_as(Qwen2_5_VLConfig),
    lambda _: _CLASSES,
    TEXT_PREFIXES,
    pruning_methods=METHODS,
    live=True,
)
