"""A language model as the runner sees it. It knows no family and no checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from services.generation.model.adapters import Adapters


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """A text model of transformers with its output layer, on its device and ready to run.

    text: called with `inputs_embeds` [1, T, D], `position_ids` (3, 1, T) and what its attention wants besides; where
        there are levels and media rows, also with `visual_pos_masks`, int64 [M], which rows those are, and
        `deepstack_visual_embeds` [embed_levels, M, D], of which number l is added to them after layer l.
    embed_tokens: ids to [.., D]; lm_head: [.., D] to [.., vocab_size].
    heads, kv_heads: those that this process computes; where several compute together, its part of the model's.
    embed_levels: tensors that a media row carries beside its embedding.
    adapters: those that `text` computes, whose rows are said before each forward.
    context_tokens: the longest sequence that the checkpoint was made for.
    """

    text: nn.Module
    embed_tokens: nn.Embedding
    lm_head: nn.Module
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context_tokens: int
    embed_levels: int
    adapters: Adapters = field(default_factory=Adapters)

    @property
    def hidden_size(self) -> int:
        return self.embed_tokens.embedding_dim

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.weight.dtype

    @property
    def token_bytes(self) -> int:
        """Of one token's keys and values, in all layers, as far as this process computes them."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize
