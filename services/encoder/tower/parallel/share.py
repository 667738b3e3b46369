"""A rank's share of the slices, run on its own device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from services.encoder.tower.graph_buckets import Packing, Size, fitting, tokens_alone
from services.encoder.tower.tower import Tower

# A rank's answers: its tower is ready, or its share is done and on its way; there is no memory for it on its device.
# Any other says why it is not done.
DONE = b""
NO_MEMORY = b"its device has no memory left"


def packing_of(tower: Tower, most_tokens: int) -> Packing:
    """How one forward of the tower is packed, where it holds at most so many tokens."""
    return tower.packing or Packing(tokens_alone(most_tokens), lambda frames: Size(tower.patches.tokens(frames), 1, 0))


def encode_share(tower: Tower, slices: Sequence[Tensor], packing: Packing) -> Tensor:
    """What `tower.encode` makes of the slices, one after the other, (1 + levels, tokens, D).

    In as many forwards as it takes: shares are even in what they cost, and that is not even in tokens.
    """
    embeds = [each for forward in _forwards(slices, packing) for each in tower.encode(forward)]
    return torch.cat(embeds, dim=1) if embeds else room_for(tower, 0)


def room_for(tower: Tower, tokens: int) -> Tensor:
    """For embeddings of so many tokens, on the tower's device."""
    return torch.empty((1 + tower.embed_levels, tokens, tower.embed_dim), dtype=tower.dtype, device=tower.device)


def _forwards(slices: Sequence[Tensor], packing: Packing) -> Iterator[Sequence[Tensor]]:
    while slices:
        count = fitting((packing.size_of(frames.shape) for frames in slices), packing.largest)
        yield slices[:count]
        slices = slices[count:]
