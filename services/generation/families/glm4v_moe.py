"""GLM-4.5V's and 4.6V's language model, a mixture of experts.

Source: arXiv 2507.01006; weight names of zai-org/GLM-4.5V.
"""

from __future__ import annotations

from typing import Any

from transformers import Glm4vMoeConfig
from transformers.models.glm4v_moe.modeling_glm4v_moe import (
    Glm4vMoeForConditionalGeneration,
    Glm4vMoeTextModel,
    Glm4vMoeTextRotaryEmbedding,
)

from framesieve.common.contract.retention import METHODS
from framesieve.services.generation.families.glm4v import TEXT_PREFIXES
from framesieve.services.generation.loading import TextClasses, TextFamily
from framesieve.services.generation.loading.weights import Named

# Published models have so many, and one that drafts, which some configs do not count.
_LAYERS = 46
_CLASSES = TextClasses(Glm4vMoeForConditionalGeneration, Glm4vMoeTextModel, Glm4vMoeTextRotaryEmbedding)


def without_drafts(config: Any) -> Named:
    """Leaves out the layers after the last, which predict further tokens. Their number is in some configs."""
    text = config.text_config
    layers = text.num_hidden_layers
    drafts = getattr(text, "num_nextn_predict_layers", int(layers == _LAYERS))
    unread = tuple(f"layers.{layers + index}." for index in range(drafts))
    return lambda name: None if name.startswith(unread) else name


FAMILY = TextFamily(
    lambda checkpoint: checkpoint.config_as(Glm4vMoeConfig),
    lambda _: _CLASSES,
    TEXT_PREFIXES,
    named=without_drafts,
    pruning_methods=METHODS,
)
