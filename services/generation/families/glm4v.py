"""GLM-4.1V's language model. Source: arXiv 2507.01006; weight names of zai-org/GLM-4.1V-9B-Thinking."""

from __future__ import annotations

from transformers import Glm4vConfig
from transformers.models.glm4v.modeling_glm4v import (
    Glm4vForConditionalGeneration,
    Glm4vTextModel,
    Glm4vTextRotaryEmbedding,
)

from framesieve.common.contract.retention import METHODS
from framesieve.services.generation.loading import TextClasses, TextFamily

TEXT_PREFIXES = ("model.language_model.",)
_CLASSES = TextClasses(Glm4vForConditionalGeneration, Glm4vTextModel, Glm4vTextRotaryEmbedding)
FAMILY = TextFamily(
    lambda checkpoint: checkpoint.config_as(Glm4vConfig), lambda _: _CLASSES, TEXT_PREFIXES, pruning_methods=METHODS
)
