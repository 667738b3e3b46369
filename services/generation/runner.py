"""One packed forward over the windows of a step.

It owns the cache and the model, and knows neither who is scheduled nor how tokens are chosen.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from services.generation.attention import KVCache, make_batch
from services.generation.families.language_model import LanguageModel
from services.generation.windows import Packed, Window, pack


class Runner:
    """Runs a language model over a paged cache of `blocks` blocks of `block_tokens` tokens each."""

    def __init__(self, model: LanguageModel, blocks: int, block_tokens: int) -> None:
        self.model = model
        self._cache = KVCache(
            model.layers, blocks, block_tokens, model.kv_heads, model.head_dim, model.embed_tokens.weight
        )

    @torch.inference_mode()
    def run(self, windows: Sequence[Window]) -> tuple[list[Window], Tensor]:
        """Computes the windows' keys and values, and what follows those that sample.

        Returns the windows that sample and their raw logits, float32 [S, vocab_size], in the same order.
        """
        packed = pack(windows, self._cache.block_tokens)
        hidden = self.model.text(
            inputs_embeds=self._embeds(packed)[None],  # [1, T, D]
            position_ids=torch.from_numpy(packed.positions)[:, None].to(self.model.device),  # [3, 1, T]
            use_cache=False,
            batch=make_batch(self._cache, packed),
        ).last_hidden_state[0]
        rows = torch.tensor(packed.last_rows, dtype=torch.int64, device=hidden.device)
        logits = self.model.lm_head(hidden[rows]).float()
        return [window for window in packed.windows if window.samples], logits

    def _embeds(self, packed: Packed) -> Tensor:
        """[T, D]: token embeddings, media rows in their places."""
        embeds: Tensor = self.model.embed_tokens(torch.from_numpy(packed.ids).to(self.model.device))
        for rows in packed.media:
            source = rows.request.embeds[rows.media_index]
            assert source is not None
            embeds[rows.at : rows.at + rows.rows] = source[0, rows.first_row : rows.first_row + rows.rows]
        return embeds
