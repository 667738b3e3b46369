"""LLaVA 1.5's tower: CLIP, SigLIP or Pixtral, and a projector. Source: `LlavaModel` of transformers 5.24."""

from __future__ import annotations

from transformers import LlavaConfig

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.services.encoder.tower.projected import load_projected
from gridsieve.services.encoder.tower.tower import Tower
from gridsieve.services.encoder.tower.vision_model import RunOptions


def load(checkpoint: Checkpoint, options: RunOptions) -> Tower:
    """Raises StartupError if the checkpoint's tower is not supported or incomplete, or the attention is unavailable."""
    return load_projected(checkpoint, checkpoint.config_as(LlavaConfig), options)
