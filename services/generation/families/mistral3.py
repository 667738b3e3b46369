"""Mistral 3's language model: Mistral, with one-dimensional positions.

Source: `Mistral3ForConditionalGeneration` of transformers 5.24; weight names of
mistralai/Mistral-Small-3.1-24B-Instruct-2503.
"""

from __future__ import annotations

import torch
from transformers import Mistral3Config, Mistral3ForConditionalGeneration

from framesieve.common.checkpoint import Checkpoint
from framesieve.services.generation.families.llava import load_linear
from framesieve.services.generation.model.language_model import LanguageModel
from framesieve.services.generation.parallel.group import Group


def load(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, group: Group | None) -> LanguageModel:
    """The family's `load_language_model`."""
    config = checkpoint.config_as(Mistral3Config)
    return load_linear(checkpoint, config, Mistral3ForConditionalGeneration, dtype, device, group)
