"""Language models of MiniCPM-V 2.5 to 4.5: Llama, Qwen2 or Qwen3, by the version.

Their config is that of the whole model.

Source: the published checkpoints of openbmb/MiniCPM-Llama3-V-2_5, MiniCPM-V-2_6, MiniCPM-V-4 and
MiniCPM-V-4_5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.families.minicpm.versions import version_of
from gridsieve.families.parts.linear_text import LINEAR_CLASSES
from gridsieve.services.generation.loading.text_family import TextClasses, TextFamily

_LLAMA = (LlamaConfig, TextClasses(LlamaForCausalLM, *LINEAR_CLASSES["llama"]))
_QWEN2 = (Qwen2Config, TextClasses(Qwen2ForCausalLM, *LINEAR_CLASSES["qwen2"]))
_QWEN3 = (Qwen3Config, TextClasses(Qwen3ForCausalLM, *LINEAR_CLASSES["qwen3"]))
_BY_VERSION: Mapping[str, tuple[Any, TextClasses]] = {"2.5": _LLAMA, "2.6": _QWEN2, "4.0": _LLAMA, "4.5": _QWEN3}
_NOT_OF_TEXT = ("model_type", "architectures", "auto_map", "vision_config", "slice_config", "version")


@dataclass(frozen=True, slots=True)
class _Whole:
    """What is read of the config of a whole model, and its classes."""

    text_config: Any
    tie_word_embeddings: bool
    classes: TextClasses


def _config(checkpoint: Checkpoint) -> _Whole:
    config_class, classes = _BY_VERSION[version_of(checkpoint.config)]
    text = checkpoint.config_as(config_class, without=_NOT_OF_TEXT)
    return _Whole(text, text.tie_word_embeddings, classes)


FAMILY = TextFamily(
    _config,
    lambda config: config.classes,
    ("llm.model.",),
    position_axes=1,
)
