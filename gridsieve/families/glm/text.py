"""GLM's language models: that of GLM-4.1V, and that of GLM-4.5V and 4.6V, a mixture of experts. The model type glm46v
has either.

Source: arXiv 2507.01006; `Glm46VForConditionalGeneration` of transformers 5.24; weight names of
zai-org/GLM-4.1V-9B-Thinking and zai-org/GLM-4.5V.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from transformers import Glm4vConfig, Glm4vMoeConfig, Glm46VConfig, Glm46VForConditionalGeneration
from transformers.models.glm4v.configuration_glm4v import Glm4vTextConfig
from transformers.models.glm4v.modeling_glm4v import (
    Glm4vForConditionalGeneration,
    Glm4vTextModel,
    Glm4vTextRotaryEmbedding,
)
from transformers.models.glm4v_moe.modeling_glm4v_moe import (
    Glm4vMoeForConditionalGeneration,
    Glm4vMoeTextModel,
    Glm4vMoeTextRotaryEmbedding,
)

from gridsieve.families.parts.linear_text import by_text_type
from gridsieve.services.generation.loading.weights import Named
from gridsieve.services.generation.parallel.sharding import PACKED

_DENSE = "glm4v_text"
_TEXT_CLASSES: Mapping[str, tuple[Any, Any]] = {
    _DENSE: (Glm4vTextModel, Glm4vTextRotaryEmbedding),
    "glm4v_moe_text": (Glm4vMoeTextModel, Glm4vMoeTextRotaryEmbedding),
}
# Of the dense model. That of transformers gathers gate and up, of which adapters then have a part alone.
_PLAN: Mapping[str, str] = {
    **(Glm4vTextConfig.base_model_tp_plan or {}),
    "layers.*.mlp.gate_up_proj": PACKED,
    "layers.*.mlp.down_proj": "rowwise",
}
# Published mixtures of experts have so many, and one that drafts, which some configs do not count.
_LAYERS = 46


def _set_plan(text: Any) -> None:
    if text.model_type == _DENSE:
        text.base_model_tp_plan = dict(_PLAN)


def _without_drafts(config: Any) -> Named:
    """Leaves out the layers after the last, which predict further tokens. Their number is in some configs."""
    text = config.text_config
    layers = text.num_hidden_layers
    drafts = getattr(text, "num_nextn_predict_layers", int(layers == _LAYERS))
    unread = tuple(f"layers.{layers + index}." for index in range(drafts))
    return lambda name: None if name.startswith(unread) else name


_family = partial(
    by_text_type,
    text_classes=_TEXT_CLASSES,
    prefixes=("model.language_model.",),
    change_config=_set_plan,
    named=_without_drafts,
)
GLM4V = _family(Glm4vConfig, Glm4vForConditionalGeneration)
GLM4V_MOE = _family(Glm4vMoeConfig, Glm4vMoeForConditionalGeneration)
GLM46V = _family(Glm46VConfig, Glm46VForConditionalGeneration)
