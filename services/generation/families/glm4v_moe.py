"""GLM-4.5V's and 4.6V's language model, a mixture of experts.

Source: arXiv 2507.01006; weight names of zai-org/GLM-4.5V.
"""

from __future__ import annotations

from transformers import Glm4vMoeConfig
from transformers.models.glm4v_moe.modeling_glm4v_moe import (
    Glm4vMoeForConditionalGeneration,
    Glm4vMoeTextModel,
    Glm4vMoeTextRotaryEmbedding,
)

from framesieve.common.contract.retention import METHODS
from framesieve.services.generation.families.glm4v import TEXT_PREFIXES
from framesieve.services.generation.loading import TextClasses, TextFamily

_CLASSES = TextClasses(Glm4vMoeForConditionalGeneration, Glm4vMoeTextModel, Glm4vMoeTextRotaryEmbedding)
FAMILY = TextFamily(
    lambda checkpoint: checkpoint.config_as(Glm4vMoeConfig), lambda _: _CLASSES, TEXT_PREFIXES, pruning_methods=METHODS
)
