"""The embeddings of media rows, from the host to the model's device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gridsieve.services.compute.transfers import pinned_for
from gridsieve.services.generation.model.language_model import LanguageModel
from gridsieve.services.generation.request.batch import MediaRows


def uploaded(model: LanguageModel, media: Sequence[MediaRows], levels: int) -> Tensor:
    """The embeddings of media rows and their first `levels` levels: [1 + levels, M, D]."""
    shape = (1 + levels, sum(each.rows for each in media), model.hidden_size)
    media_embeds = torch.empty(shape, dtype=model.dtype, device=model.device)
    at = 0
    for each in media:
        # Level by level: rows of one level are contiguous in pinned memory, so the host does not wait.
        for level, rows in zip(media_embeds, _features(each)[: 1 + levels], strict=True):
            level[at : at + each.rows].copy_(pinned_for(rows, model.device), non_blocking=True)
        at += each.rows
    return media_embeds


def _features(media: MediaRows) -> Tensor:
    embeds = media.request.embeds[media.media_index]
    assert embeds is not None
    first = media.first_row - (media.request.prompt.num_kept[media.media_index] - embeds.shape[1])
    assert first >= 0, f"{media.request} lacks rows of item {media.media_index} that the cache lacks, too"
    return embeds[:, first : first + media.rows]
