"""The language model as the runner sees it, independent of model family and checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from gridsieve.services.generation.model.adapters import Adapters
from gridsieve.services.generation.model.draft_head import DraftHead
from gridsieve.services.generation.model.reading import Reading
from gridsieve.services.generation.model.states import StateSizes


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """A text model of transformers and its output layer, on its device and ready to run.

    text: called with `inputs_embeds` [1, T, D], `position_ids` and the arguments of its attention; with
        media rows and embed_levels > 0 also with `visual_pos_masks`, int64 [M], the indices of the media rows, and
        `deepstack_visual_embeds` [embed_levels, M, D]; number l is added to the media rows after layer l. Compiled
        forwards: see `levels`.
    embed_tokens: ids to [.., D]; lm_head: [.., D] to [.., vocab_size].
    layers: those with keys and values. states: of the recurrent states of the others; None if there are none.
    heads, kv_heads: those of this process; under tensor parallelism a part of the model's.
    embed_levels: deepstack tensors of a media row beside its embedding.
    adapters: those loaded into `text`; their rows must be set before each forward.
    context_tokens: the longest sequence that the checkpoint supports.
    stored: number of vectors after the vocabulary's in `embed_tokens`.
    fp8_cache: keys and values are stored in fp8, else in the model's dtype.
    deterministic: set by `determinism.made_deterministic`.
    draft: the head that drafts tokens for it, if there is one.
    reads: how prompts are read; None of a model that generates. `lm_head` then makes of a state what is read: the
        state itself, or a score.
    clock_times: see `TextFamily`.
    position_axes: of the positions that `text` takes: 3; 1 of a model whose axes are all equal; 0 if it knows none.
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
    states: StateSizes | None = None
    position_axes: int = 3
    stored: int = 0
    fp8_cache: bool = False
    deterministic: bool = False
    adapters: Adapters = field(default_factory=Adapters)
    draft: DraftHead | None = None
    reads: Reading | None = None
    clock_times: bool = False

    def position_ids(self, positions: Tensor) -> Tensor:
        """int64 [3, T] as `text` takes them: [3, 1, T] or [1, T], which a model without positions ignores."""
        return positions[:, None] if self.position_axes == len(positions) else positions[:1]

    def with_stored(self, vectors: Tensor) -> LanguageModel:
        """The model with vectors [n, D], of its dtype, that prompts name by the ids after the vocabulary's."""
        table = nn.Embedding.from_pretrained(torch.cat([self.embed_tokens.weight, vectors.to(self.device)]))
        self.text.embed_tokens = table  # of which it keeps no second copy
        return replace(self, embed_tokens=table, stored=len(vectors))

    @property
    def vocab_size(self) -> int:
        """Number of the ids that text and answers have."""
        return self.embed_tokens.num_embeddings - self.stored

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
        """Bytes of one token's keys and values in all layers that have them, for the KV heads of this process, and in
        the head that drafts."""
        values = 2 * self.layers * self.kv_heads * self.head_dim + (self.draft.sizes.token_values if self.draft else 0)
        return values * (1 if self.fp8_cache else self.dtype.itemsize)
