"""The vision tower of Qwen3.5, 3.6 and 3.8, dense and mixture of experts: Qwen3-VL's without deepstack.

`Qwen3_5VisionModel` of transformers 5.24 is `Qwen3VLVisionModel` without the mergers of deepstack, layer for layer.
"""

from __future__ import annotations

from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig

from framesieve.common.checkpoint import Checkpoint
from framesieve.services.encoder.families.qwen3_vl import tower_of
from framesieve.services.encoder.tower.tower import Tower
from framesieve.services.encoder.tower.vision_model import RunOptions, vision_config


def load(checkpoint: Checkpoint, options: RunOptions) -> Tower:
    """What it raises: see `make_tower`."""
    config = vision_config(checkpoint, Qwen3VLVisionConfig)
    config.deepstack_visual_indexes = ()  # saved configs lack the field, whose default is Qwen3-VL's layers
    return tower_of(checkpoint, config, options)
