"""The arithmetic operations of a language model, by its config; a multiplication and an addition count as two."""

from __future__ import annotations

from typing import Any

from services.generation.model.language_model import LanguageModel


def prefill_operations(model: LanguageModel, tokens: int) -> float:
    """Operations of one prefill: 2 per layer weight and token, 2 per output layer weight, and causal attention."""
    config: Any = model.text.config
    hidden, heads = config.hidden_size, config.num_attention_heads
    attention = (2 * heads + 2 * model.kv_heads) * model.head_dim * hidden
    weights = model.layers * (attention + 3 * hidden * config.intermediate_size)
    quadratic = 2 * tokens**2 * heads * model.head_dim * model.layers
    return float(2 * tokens * weights + quadratic + 2 * hidden * config.vocab_size)
