"""Language models of MiniCPM-V 4.6 and 4.7: Qwen3.5's. Positions are one-dimensional in 4.6, those of canvases in 4.7.

Source: transformers 5.24, which has both as classes of their own; weight names of openbmb/MiniCPM-V-4.6.
"""

from __future__ import annotations

from transformers import (
    MiniCPMV4_6Config,
    MiniCPMV4_6ForConditionalGeneration,
    MiniCPMV4_7Config,
    MiniCPMV4_7ForConditionalGeneration,
)
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextModel, Qwen3_5TextRotaryEmbedding

from gridsieve.services.generation.loading.text_family import TextClasses, TextFamily

_PREFIXES = ("model.language_model.",)

FAMILY, CANVAS_FAMILY = (
    TextFamily.of(
        config_class,
        TextClasses(whole_class, Qwen3_5TextModel, Qwen3_5TextRotaryEmbedding),
        _PREFIXES,
        position_axes=position_axes,
    )
    for config_class, whole_class, position_axes in (
        (MiniCPMV4_6Config, MiniCPMV4_6ForConditionalGeneration, 1),
        (MiniCPMV4_7Config, MiniCPMV4_7ForConditionalGeneration, 3),
    )
)
