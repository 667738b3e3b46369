"""GLM-4.1V's language model. Source: arXiv 2507.01006; weight names of zai-org/GLM-4.1V-9B-Thinking."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import Glm4vConfig
from transformers.models.glm4v.configuration_glm4v import Glm4vTextConfig
from transformers.models.glm4v.modeling_glm4v import (
    Glm4vForConditionalGeneration,
    Glm4vTextModel,
    Glm4vTextRotaryEmbedding,
)

from framesieve.common.contract.retention import METHODS
from framesieve.services.generation.loading import TextClasses, TextFamily
from framesieve.services.generation.parallel.sharding import PACKED

TEXT_PREFIXES = ("model.language_model.",)
# That of transformers gathers gate and up, of which adapters then have a part alone.
PLAN: Mapping[str, str] = {
    **(Glm4vTextConfig.base_model_tp_plan or {}),
    "layers.*.mlp.gate_up_proj": PACKED,
    "layers.*.mlp.down_proj": "rowwise",
}
_CLASSES = TextClasses(Glm4vForConditionalGeneration, Glm4vTextModel, Glm4vTextRotaryEmbedding)


def with_plan(config: Any) -> Any:
    """The config of a whole model, with this plan for its dense text model."""
    config.text_config.base_model_tp_plan = dict(PLAN)
    return config


FAMILY = TextFamily(
    lambda checkpoint: with_plan(checkpoint.config_as(Glm4vConfig)),
    lambda _: _CLASSES,
    TEXT_PREFIXES,
    pruning_methods=METHODS,
)
