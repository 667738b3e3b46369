"""LLaVA-OneVision's language model, and its newline: a stored vector, which prompts name by the id behind the last.

Source: `LlavaOnevisionForConditionalGeneration` of transformers 5.24; weight names of
llava-hf/llava-onevision-qwen2-7b-ov-hf.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration

from framesieve.common.checkpoint import Checkpoint
from framesieve.common.contract.errors import StartupError
from framesieve.services.generation.families.llava import load_linear
from framesieve.services.generation.loading.weights import read_weights
from framesieve.services.generation.model.language_model import LanguageModel
from framesieve.services.generation.parallel.group import Group

_NEWLINES = ("model.image_newline", "image_newline")


def load(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, group: Group | None) -> LanguageModel:
    """The family's `load_language_model`."""
    config = checkpoint.config_as(LlavaOnevisionConfig)
    return load_with_newline(checkpoint, config, LlavaOnevisionForConditionalGeneration, dtype, device, group)


def load_with_newline(
    checkpoint: Checkpoint, config: Any, whole_class: Any, dtype: torch.dtype, device: torch.device, group: Group | None
) -> LanguageModel:
    """As `load_linear`, with the newline as the only stored vector."""
    model = load_linear(checkpoint, config, whole_class, dtype, device, group)
    for name in _NEWLINES:
        if vector := read_weights(checkpoint, name, model.dtype, device, {}):
            return model.with_stored(vector[""])
    raise StartupError(f"missing weights ['{_NEWLINES[-1]}']")
