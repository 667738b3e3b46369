"""Which language models there are. Adding one adds a file and a line here."""

from __future__ import annotations

import torch

from common.checkpoint import Checkpoint
from services.generation.families import qwen2_5_vl, qwen3_vl
from services.generation.families.language_model import LanguageModel

FAMILIES = {
    "qwen2_5_vl": qwen2_5_vl.load,
    "qwen3_vl": qwen3_vl.load,
    "qwen3_vl_moe": qwen3_vl.load_moe,
}


def load_language_model(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> LanguageModel:
    """Raises StartupError for a model type that is not supported, or a checkpoint that is not whole."""
    return checkpoint.pick(FAMILIES)(checkpoint, dtype, device)
