"""Language models of MiniCPM-V 4.6 and 4.7: Qwen3.5's. Positions are one-dimensional in 4.6, those of canvases in 4.7.

Source: transformers 5.24, which has both as classes of their own; weight names of openbmb/MiniCPM-V-4.6.
"""

from __future__ import annotations

from typing import Any

from transformers import (
    MiniCPMV4_6Config,
    MiniCPMV4_6ForConditionalGeneration,
    MiniCPMV4_7Config,
    MiniCPMV4_7ForConditionalGeneration,
)
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextModel, Qwen3_5TextRotaryEmbedding

from gridsieve.common.minicpmv import PRUNING_METHODS_OF_PLACES, WHY_NOT_ALL_OF_PLACES
from gridsieve.services.generation.families.qwen3_vl import TEXT_PREFIX
from gridsieve.services.generation.loading import TextClasses, TextFamily


def _family(config_class: Any, whole_class: Any, position_axes: int) -> TextFamily:
    return TextFamily(
        lambda checkpoint: checkpoint.config_as(config_class),
        lambda _: TextClasses(whole_class, Qwen3_5TextModel, Qwen3_5TextRotaryEmbedding),
        (TEXT_PREFIX,),
        position_axes=position_axes,
        pruning_methods=PRUNING_METHODS_OF_PLACES,
        why_not_all=WHY_NOT_ALL_OF_PLACES,
    )


FAMILY = _family(MiniCPMV4_6Config, MiniCPMV4_6ForConditionalGeneration, position_axes=1)
CANVAS_FAMILY = _family(MiniCPMV4_7Config, MiniCPMV4_7ForConditionalGeneration, position_axes=3)
