"""One packed forward over the windows of a step.

It owns the cache and the model, and knows neither who is scheduled nor how tokens are chosen.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from services.generation.attention import KVCache, make_batch
from services.generation.families.language_model import LanguageModel
from services.generation.windows import Int64Array, MediaRows, Packed, Window, pack


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
        embeds: Tensor = self.model.embed_tokens(self._on_device(packed.ids))
        levels = self._put_media(packed, embeds)
        hidden = self.model.text(
            inputs_embeds=embeds[None],  # [1, T, D]
            position_ids=self._on_device(packed.positions)[:, None],  # [3, 1, T]
            use_cache=False,
            batch=make_batch(self._cache, packed),
            **levels,
        ).last_hidden_state[0]
        rows = torch.tensor(packed.last_rows, dtype=torch.int64, device=hidden.device)
        logits = self.model.lm_head(hidden[rows]).float()
        return [window for window in packed.windows if window.samples], logits

    def _put_media(self, packed: Packed, embeds: Tensor) -> dict[str, Tensor]:
        """Puts media rows into `embeds` [T, D], and returns what the model must be told of their levels."""
        if not packed.media:
            return {}
        rows = self._on_device(np.concatenate([np.arange(media.at, media.at + media.rows) for media in packed.media]))
        features = torch.cat([_features(media) for media in packed.media], dim=1)  # [1 + levels, M, D]
        embeds.index_copy_(0, rows, features[0])
        if not self.model.embed_levels:
            return {}
        return {"visual_pos_masks": rows, "deepstack_visual_embeds": features[1:]}

    def _on_device(self, array: Int64Array) -> Tensor:
        return torch.from_numpy(array).to(self.model.device)


def _features(media: MediaRows) -> Tensor:
    embeds = media.request.embeds[media.media_index]
    assert embeds is not None
    first = media.first_row - (media.request.kept_counts[media.media_index] - embeds.shape[1])
    assert first >= 0, f"{media.request} lacks rows of item {media.media_index} that are not in the cache"
    return embeds[:, first : first + media.rows]
