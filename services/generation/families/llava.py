"""Language models of LLaVA 1.5 and of models in its layout: Llama, Mistral, Qwen2 or Qwen3, with one-dimensional
positions.

Source: `LlavaForConditionalGeneration` of transformers 5.24; weight names of llava-hf/llava-1.5-7b-hf.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import LlavaConfig, LlavaForConditionalGeneration
from transformers.models.llama.modeling_llama import LlamaModel, LlamaRotaryEmbedding
from transformers.models.mistral.modeling_mistral import MistralModel, MistralRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2Model, Qwen2RotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3Model, Qwen3RotaryEmbedding
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeModel, Qwen3MoeRotaryEmbedding

from framesieve.common.checkpoint import Checkpoint
from framesieve.common.contract.errors import StartupError
from framesieve.services.generation.loading import TextClasses, TextFamily

# Of transformers 5, and of published checkpoints, whose output layer is below the text model, too.
TEXT_PREFIXES = ("model.language_model.", "language_model.model.")
NEWLINES = ("model.image_newline", "image_newline")
_TEXT_CLASSES: Mapping[str, tuple[Any, Any]] = {
    "llama": (LlamaModel, LlamaRotaryEmbedding),
    "mistral": (MistralModel, MistralRotaryEmbedding),
    "qwen2": (Qwen2Model, Qwen2RotaryEmbedding),
    "qwen3": (Qwen3Model, Qwen3RotaryEmbedding),
    "qwen3_moe": (Qwen3MoeModel, Qwen3MoeRotaryEmbedding),
}

_DYNAMIC = "dynamic"


def linear_family(config_class: Any, whole_class: Any, stored: Sequence[str] = ()) -> TextFamily:
    """Language models with one-dimensional positions. config_class, whole_class: transformers', of the whole model."""

    def config(checkpoint: Checkpoint) -> Any:
        found = checkpoint.config_as(config_class)
        text = found.text_config
        if text.model_type not in _TEXT_CLASSES:
            raise StartupError(
                f"text_config.model_type {text.model_type!r} is not supported, only {', '.join(_TEXT_CLASSES)}"
            )
        rope = text.rope_parameters or {}
        if rope.get("rope_type") == _DYNAMIC:
            # Up to max_position_embeddings the frequencies are those of `default`, and `PromptLimit` keeps the
            # positions of these models below it. transformers' class for `dynamic` would wait for the device in each
            # forward.
            text.rope_parameters = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
        return found

    def classes(config: Any) -> TextClasses:
        return TextClasses(whole_class, *_TEXT_CLASSES[config.text_config.model_type])

    return TextFamily(config, classes, TEXT_PREFIXES, position_axes=1, stored=stored)


FAMILY = linear_family(LlavaConfig, LlavaForConditionalGeneration)
