"""Language models of LLaVA 1.5 and of models in its layout: Llama, Mistral or Qwen2, with one-dimensional positions.

Source: `LlavaForConditionalGeneration` of transformers 5.24; weight names of llava-hf/llava-1.5-7b-hf.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers import LlavaConfig, LlavaForConditionalGeneration
from transformers.models.llama.modeling_llama import LlamaModel, LlamaRotaryEmbedding
from transformers.models.mistral.modeling_mistral import MistralModel, MistralRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2Model, Qwen2RotaryEmbedding

from framesieve.common.checkpoint import Checkpoint
from framesieve.common.contract.errors import StartupError
from framesieve.services.generation.loading import TextClasses, load_text
from framesieve.services.generation.model.language_model import LanguageModel
from framesieve.services.generation.parallel.group import Group

# Of transformers 5, and of published checkpoints, whose output layer is below the text model, too.
TEXT_PREFIXES = ("model.language_model.", "language_model.model.")
_TEXT_CLASSES: Mapping[str, tuple[Any, Any]] = {
    "llama": (LlamaModel, LlamaRotaryEmbedding),
    "mistral": (MistralModel, MistralRotaryEmbedding),
    "qwen2": (Qwen2Model, Qwen2RotaryEmbedding),
}

_DYNAMIC = "dynamic"


def load(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, group: Group | None) -> LanguageModel:
    """The family's `load_language_model`."""
    config = checkpoint.config_as(LlavaConfig)
    return load_linear(checkpoint, config, LlavaForConditionalGeneration, dtype, device, group)


def load_linear(
    checkpoint: Checkpoint, config: Any, whole_class: Any, dtype: torch.dtype, device: torch.device, group: Group | None
) -> LanguageModel:
    """A language model with one-dimensional positions. config, whole_class: of the whole model."""
    kind = config.text_config.model_type
    if kind not in _TEXT_CLASSES:
        raise StartupError(f"text_config.model_type {kind!r} is not supported, only {', '.join(_TEXT_CLASSES)}")
    rope = config.text_config.rope_parameters or {}
    if rope.get("rope_type") == _DYNAMIC:
        # Up to max_position_embeddings the frequencies are those of `default`, and `PromptLimit` keeps the positions of
        # these models below it. transformers' class for `dynamic` would wait for the device in each forward.
        config.text_config.rope_parameters = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    classes = TextClasses(whole_class, *_TEXT_CLASSES[kind])
    model = load_text(checkpoint, config, classes, TEXT_PREFIXES, dtype, device, group)
    return replace(model, position_axes=1)
