"""InternVL's language model, with one-dimensional positions.

Source: `InternVLForConditionalGeneration` of transformers 5.24; weight names of OpenGVLab/InternVL3-8B-hf.
"""

from __future__ import annotations

import torch
from transformers import InternVLConfig, InternVLForConditionalGeneration

from framesieve.common.checkpoint import Checkpoint
from framesieve.services.generation.families.llava import load_linear
from framesieve.services.generation.model.language_model import LanguageModel
from framesieve.services.generation.parallel.group import Group


def load(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, group: Group | None) -> LanguageModel:
    """The family's `load_language_model`."""
    config = checkpoint.config_as(InternVLConfig)
    return load_linear(checkpoint, config, InternVLForConditionalGeneration, dtype, device, group)
