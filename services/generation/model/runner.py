"""One packed forward over the windows of a step.

It owns the cache and the model, and knows neither who is scheduled nor how tokens are chosen.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import structlog
import torch
from torch import Tensor

from services.generation.model.attention import make_cache
from services.generation.model.attention.cache import CacheSizes
from services.generation.model.graphs import Capture, DecodeGraphs
from services.generation.model.language_model import LanguageModel
from services.generation.request.batch import MediaRows, Packed, Window, pack, singles_first
from services.generation.to_device import tensor_to_device, to_device

log = structlog.get_logger()


class OutOfStep(Exception):
    """Ranks that compute together no longer do: what their caches hold is not the same from here on."""


class Followers(Protocol):
    """The other ranks that hold a part of the model."""

    def tell(self, packed: Packed, features: Tensor | None) -> None:
        """Has each of them compute what this rank computes next."""


class Runner:
    """Runs a language model over a paged cache of `blocks` blocks of `block_tokens` tokens each."""

    def __init__(
        self, model: LanguageModel, blocks: int, block_tokens: int, followers: Followers | None = None
    ) -> None:
        self.model = model
        self._followers = followers
        sizes = CacheSizes(model.layers, blocks, block_tokens, model.heads, model.kv_heads, model.head_dim)
        self._cache = make_cache(sizes, model.embed_tokens.weight)
        self._graphs: DecodeGraphs | None = None

    @torch.inference_mode()
    def capture_decoding(self, most_requests: int, most_tokens: int, capture: Capture) -> bool:
        """Has steps that only decode replayed as graphs, for up to so many requests of up to so many tokens.

        Returns whether they are: a model that no graph can hold is run as before.
        """
        start = time.perf_counter()
        blocks = -(-most_tokens // self._cache.sizes.block_tokens)
        try:
            self._graphs = DecodeGraphs(self.model, self._cache, most_requests, blocks, capture)
        except RuntimeError as error:
            log.warning("decoding without graphs", error=str(error.__context__ or error))  # what ended the capture
            return False
        log.info("decode steps captured", graphs=len(self._graphs), seconds=round(time.perf_counter() - start, 3))
        return True

    def decode_eagerly(self) -> None:
        """Gives up the graphs that were captured."""
        self._graphs = None

    @torch.inference_mode()
    def run(self, windows: Sequence[Window]) -> tuple[list[Window], Tensor]:
        """Computes the windows' keys and values, and what follows those that sample.

        Returns the windows that sample and their raw logits, float32 [S, vocab_size], in the same order, one row for
        each and one for each of its guesses. Raises OutOfStep for whatever fails once other ranks are told to compute
        the same; what fails before leaves them as they are.
        """
        packed, media = pack(windows, self._cache.sizes.block_tokens)
        device = self.model.device
        features = torch.cat([tensor_to_device(_features(each), device) for each in media], dim=1) if media else None
        sampled = [window for window in singles_first(windows) if window.samples]
        if self._followers is None:
            return sampled, self.compute(packed, features)
        try:
            self._followers.tell(packed, features)
            return sampled, self.compute(packed, features)
        except Exception as error:
            raise OutOfStep(str(error)) from error

    @torch.inference_mode()
    def compute(self, packed: Packed, features: Tensor | None) -> Tensor:
        """Raw logits of the wanted rows, float32 [S, vocab_size].

        features: [1 + embed_levels, M, D], what the media rows carry; None if there are none.
        """
        rows = to_device(packed.last_rows, self.model.device)
        self.model.adapters.rows = packed.adapted
        replayed = self._graphs.replay(packed) if self._graphs else None
        return self._forward(packed, rows, features) if replayed is None else replayed[rows]

    def _forward(self, packed: Packed, rows: Tensor, features: Tensor | None) -> Tensor:
        embeds: Tensor = self.model.embed_tokens(to_device(packed.ids, self.model.device))
        levels = {} if features is None else self._put_media(packed, embeds, features)
        hidden = self.model.text(
            inputs_embeds=embeds[None],  # [1, T, D]
            position_ids=to_device(packed.positions, self.model.device)[:, None],  # [3, 1, T]
            use_cache=False,
            batch=self._cache.batch(packed),
            **levels,
        ).last_hidden_state[0]
        logits: Tensor = self.model.lm_head(hidden[rows])
        return logits.float()

    def _put_media(self, packed: Packed, embeds: Tensor, features: Tensor) -> dict[str, Tensor]:
        """Puts media rows into `embeds` [T, D], and returns what the model must be told of their levels."""
        rows = to_device(packed.media_rows, self.model.device)
        embeds.index_copy_(0, rows, features[0])
        if not self.model.embed_levels:
            return {}
        return {"visual_pos_masks": rows, "deepstack_visual_embeds": features[1:]}


def _features(media: MediaRows) -> Tensor:
    embeds = media.request.embeds[media.media_index]
    assert embeds is not None
    first = media.first_row - (media.request.kept_counts[media.media_index] - embeds.shape[1])
    assert first >= 0, f"{media.request} lacks rows of item {media.media_index} that are not in the cache"
    return embeds[:, first : first + media.rows]
