"""The arithmetic operations of a language model, by its config; a multiplication and an addition count as two."""

from __future__ import annotations

from typing import Any

from gridsieve.services.generation.model.language_model import LanguageModel


def prefill_operations(model: LanguageModel, tokens: int) -> float:
    """Operations of one prefill: 2 per layer weight and token, 2 per output layer weight, and causal attention."""
    quadratic = 2 * tokens**2 * model.heads * model.head_dim * model.layers
    return float(2 * tokens * _layer_weights(model) + quadratic + 2 * model.hidden_size * model.vocab_size)


def decode_operations(model: LanguageModel, sequences: int, context: float) -> float:
    """Operations of one token of each sequence, which attends to `context` tokens: 2 per weight, and attention."""
    attention = 4 * context * model.heads * model.head_dim * model.layers
    return float(sequences * (2 * weights(model) + attention))


def weights(model: LanguageModel) -> int:
    """Weights of the layers and the output layer, by each of which a decoded token is multiplied once."""
    return _layer_weights(model) + model.hidden_size * model.vocab_size


def _layer_weights(model: LanguageModel) -> int:
    config: Any = model.text.config
    attention = (2 * model.heads + 2 * model.kv_heads) * model.head_dim * model.hidden_size
    return int(model.layers * (attention + 3 * model.hidden_size * config.intermediate_size))
