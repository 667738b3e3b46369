"""Language models under the model type glm46v: those of GLM-4.1V and of GLM-4.5V.

Source: `Glm46VForConditionalGeneration` of transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import Glm46VConfig, Glm46VForConditionalGeneration
from transformers.models.glm4v.modeling_glm4v import Glm4vTextModel, Glm4vTextRotaryEmbedding
from transformers.models.glm4v_moe.modeling_glm4v_moe import Glm4vMoeTextModel, Glm4vMoeTextRotaryEmbedding

from framesieve.common.checkpoint import Checkpoint
from framesieve.common.contract.errors import StartupError
from framesieve.common.contract.retention import METHODS
from framesieve.services.generation.families.glm4v import TEXT_PREFIXES, with_plan
from framesieve.services.generation.families.glm4v_moe import without_drafts
from framesieve.services.generation.loading import TextClasses, TextFamily

_TEXT_CLASSES: Mapping[str, tuple[Any, Any]] = {
    "glm4v_text": (Glm4vTextModel, Glm4vTextRotaryEmbedding),
    "glm4v_moe_text": (Glm4vMoeTextModel, Glm4vMoeTextRotaryEmbedding),
}


def _config(checkpoint: Checkpoint) -> Any:
    config = checkpoint.config_as(Glm46VConfig)
    if (text := config.text_config.model_type) not in _TEXT_CLASSES:
        raise StartupError(f"text_config.model_type {text!r} is not supported, only {', '.join(_TEXT_CLASSES)}")
    return with_plan(config) if text == "glm4v_text" else config


FAMILY = TextFamily(
    _config,
    lambda config: TextClasses(Glm46VForConditionalGeneration, *_TEXT_CLASSES[config.text_config.model_type]),
    TEXT_PREFIXES,
    named=without_drafts,
    pruning_methods=METHODS,
)
