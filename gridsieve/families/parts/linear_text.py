"""Language models whose classes `text_config.model_type` names; of these, those with one-dimensional positions in the
layout of LLaVA 1.5: Llama, Mistral, Qwen2 or Qwen3.

Source: transformers 5.24; weight names of llava-hf/llava-1.5-7b-hf, llava-hf/LLaVA-NeXT-Video-7B-hf,
llava-hf/llava-onevision-qwen2-7b-ov-hf, mistralai/Mistral-Small-3.1-24B-Instruct-2503 and OpenGVLab/InternVL3-8B-hf.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers.models.llama.modeling_llama import LlamaModel, LlamaRotaryEmbedding
from transformers.models.mistral.modeling_mistral import MistralModel, MistralRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2Model, Qwen2RotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3Model, Qwen3RotaryEmbedding
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeModel, Qwen3MoeRotaryEmbedding

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.services.generation.loading.text_family import StoredVectors, TextClasses, TextFamily

# Of transformers 5, and of published checkpoints, whose output layer is below the text model, too.
_TEXT_PREFIXES = ("model.language_model.", "language_model.model.")
LINEAR_CLASSES: Mapping[str, tuple[Any, Any]] = {
    "llama": (LlamaModel, LlamaRotaryEmbedding),
    "mistral": (MistralModel, MistralRotaryEmbedding),
    "qwen2": (Qwen2Model, Qwen2RotaryEmbedding),
    "qwen3": (Qwen3Model, Qwen3RotaryEmbedding),
    "qwen3_moe": (Qwen3MoeModel, Qwen3MoeRotaryEmbedding),
}

_DYNAMIC = "dynamic"


def by_text_type(
    config_class: Any,
    whole_class: Any,
    text_classes: Mapping[str, tuple[Any, Any]],
    prefixes: Sequence[str],
    change_config: Callable[[Any], None],
    **others: Any,
) -> TextFamily:
    """config_class, whole_class: transformers', of the whole model. text_classes: its text models and their rotary
    embeddings, by its model_type. change_config: changes text_config. prefixes, others: see `TextFamily`.
    """

    def config(checkpoint: Checkpoint) -> Any:
        found = checkpoint.config_as(config_class)
        if (text := found.text_config).model_type not in text_classes:
            raise StartupError(
                f"text_config.model_type {text.model_type!r} is not supported, only {', '.join(text_classes)}"
            )
        change_config(text)
        return found

    def classes(config: Any) -> TextClasses:
        return TextClasses(whole_class, *text_classes[config.text_config.model_type])

    return TextFamily(config, classes, prefixes, **others)


def linear_family(config_class: Any, whole_class: Any, stored: Sequence[StoredVectors] = ()) -> TextFamily:
    """config_class, whole_class: transformers', of the whole model. stored: see `TextFamily`."""
    return by_text_type(
        config_class, whole_class, LINEAR_CLASSES, _TEXT_PREFIXES, _simplify_rope, position_axes=1, stored=stored
    )


def _simplify_rope(text: Any) -> None:
    """Up to max_position_embeddings the frequencies of `dynamic` are those of `default`, and `PromptLimit` keeps the
    positions of these models below it. transformers' class for `dynamic` would wait for the device in each forward."""
    rope = text.rope_parameters or {}
    if rope.get("rope_type") == _DYNAMIC:
        text.rope_parameters = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
