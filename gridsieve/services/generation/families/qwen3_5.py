"""Qwen3.5's language models, and those of its line, dense and mixture of experts: three of four layers are gated delta
networks, which keep a recurrent state, the fourth is gated attention with partial rotary embeddings.

Source: transformers' classes; weight names of Qwen/Qwen3.5-9B and Qwen/Qwen3.5-35B-A3B. The weights `mtp.*`, which
predict several tokens, are read by `loading/mtp.py`.
"""

from __future__ import annotations

from typing import Any

from transformers import Qwen3_5Config, Qwen3_5MoeConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextModel,
    Qwen3_5TextRotaryEmbedding,
)
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import (
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextModel,
    Qwen3_5MoeTextRotaryEmbedding,
)

from gridsieve.common.contract.retention import METHODS
from gridsieve.services.generation.families.qwen3_vl import TEXT_PREFIX, transpose_experts
from gridsieve.services.generation.loading import TextClasses, TextFamily


def _family(config_class: Any, classes: TextClasses) -> TextFamily:
    return TextFamily(
        lambda checkpoint: checkpoint.config_as(config_class),
        lambda _: classes,
        (TEXT_PREFIX,),
        change=transpose_experts,
        pruning_methods=METHODS,
        live=True,
    )


FAMILY = _family(
    Qwen3_5Config, TextClasses(Qwen3_5ForConditionalGeneration, Qwen3_5TextModel, Qwen3_5TextRotaryEmbedding)
)
MOE_FAMILY = _family(
    Qwen3_5MoeConfig,
    TextClasses(Qwen3_5MoeForConditionalGeneration, Qwen3_5MoeTextModel, Qwen3_5MoeTextRotaryEmbedding),
)
