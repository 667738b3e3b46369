"""LLaVA 1.5's tower: CLIP, SigLIP or Pixtral, and a projector. Source: `LlavaModel` of transformers 5.24."""

from __future__ import annotations

import torch
from transformers import LlavaConfig

from framesieve.common.checkpoint import Checkpoint
from framesieve.services.encoder.tower.attention import Wanted
from framesieve.services.encoder.tower.projected import load_projected
from framesieve.services.encoder.tower.tower import Tower


def load(checkpoint: Checkpoint, dtype: str, device: torch.device, attention: Wanted) -> Tower:
    """Raises StartupError if the checkpoint's tower is not supported or incomplete, or the attention is unavailable."""
    return load_projected(checkpoint, checkpoint.config_as(LlavaConfig), dtype, device, attention)
