"""LLaVA-NeXT-Video's language model, and its newline, a stored vector.

Source: `LlavaNextVideoForConditionalGeneration` of transformers 5.24; weight names of llava-hf/LLaVA-NeXT-Video-7B-hf.
"""

from __future__ import annotations

import torch
from transformers import LlavaNextVideoConfig, LlavaNextVideoForConditionalGeneration

from framesieve.common.checkpoint import Checkpoint
from framesieve.services.generation.families.llava_onevision import load_with_newline
from framesieve.services.generation.model.language_model import LanguageModel
from framesieve.services.generation.parallel.group import Group


def load(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, group: Group | None) -> LanguageModel:
    """The family's `load_language_model`."""
    config = checkpoint.config_as(LlavaNextVideoConfig)
    return load_with_newline(checkpoint, config, LlavaNextVideoForConditionalGeneration, dtype, device, group)
