"""How many operations a language model takes, multiplications and additions counted apart, by its config's sizes."""

from __future__ import annotations

from typing import Any

from services.generation.model.language_model import LanguageModel


def prefill_operations(model: LanguageModel, tokens: int) -> float:
    """Of one prefill: every weight of every layer twice a token, the output layer's twice, and causal attention."""
    config: Any = model.text.config
    hidden, heads = config.hidden_size, config.num_attention_heads
    attention = (2 * heads + 2 * model.kv_heads) * model.head_dim * hidden
    weights = model.layers * (attention + 3 * hidden * config.intermediate_size)
    quadratic = 2 * tokens**2 * heads * model.head_dim * model.layers
    return float(2 * tokens * weights + quadratic + 2 * hidden * config.vocab_size)
