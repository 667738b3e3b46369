"""MiniCPM-V's resampler: learned queries attend to the patches of a picture, so each becomes as many tokens.

    keys    patches + positions      values    patches without them
    2-D positions: columns in the first half of the channels, rows in the second, sines before cosines

Positions are computed, not looked up, so a picture may have any number of rows and columns.
Source: the published `resampler.py` of openbmb/MiniCPM-V-2_6; Q-Former-like resampling, arXiv 2308.12966.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from services.encoder.tower.attention import Attend

_HEAD_DIM = 128
_EPSILON = 1e-6
_LONGEST_WAVE = 10_000.0


class Resampler(nn.Module):
    """queries: of each picture. width: of the language model. patch_width: of the tower."""

    def __init__(self, queries: int, width: int, patch_width: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.empty(queries, width))
        self.kv_proj = nn.Identity() if patch_width == width else nn.Linear(patch_width, width, bias=False)
        self.attn = nn.MultiheadAttention(width, width // _HEAD_DIM)
        self.ln_q, self.ln_kv, self.ln_post = (nn.LayerNorm(width, eps=_EPSILON) for _ in range(3))
        self.proj = nn.Parameter(torch.empty(width, width))

    def forward(
        self, patches: Tensor, places: Tensor, ends: Tensor, longest: int, query_ends: Tensor, attend: Attend
    ) -> Tensor:
        """Tokens (S · queries, width) of S pictures.

        patches: (P, patch_width), packed. places: int64 (P, 2), row and column. ends: int32 (S + 1,) of pictures, the
        longest of which has `longest` patches. query_ends: int32 (S + 1,), of their queries; behind the last end are
        rows of no picture.
        """
        values = self.ln_kv(self.kv_proj(patches))
        keys = values + place_embeddings(places, values.shape[-1]).to(values.dtype)
        weights, biases = self.attn.in_proj_weight.chunk(3), self.attn.in_proj_bias.chunk(3)
        heads = (self.attn.num_heads, self.attn.head_dim)
        query = F.linear(self.ln_q(self.query), weights[0], biases[0])
        pictures = query_ends.shape[0] - 1
        attended = attend(
            query.repeat(pictures, 1).unflatten(1, heads),
            F.linear(keys, weights[1], biases[1]).unflatten(1, heads),
            F.linear(values, weights[2], biases[2]).unflatten(1, heads),
            query_ends,
            ends,
            query.shape[0],
            longest,
        )
        tokens: Tensor = self.ln_post(self.attn.out_proj(attended.flatten(1))) @ self.proj
        return tokens


def place_embeddings(places: Tensor, width: int) -> Tensor:
    """Sines and cosines of columns, then of rows: (P, 2), row and column, to float32 (P, width)."""
    row, column = places.unbind(1)
    return torch.cat([_waves(column, width // 2), _waves(row, width // 2)], dim=1)


def _waves(at: Tensor, width: int) -> Tensor:
    exponents = torch.arange(width // 2, dtype=torch.float32, device=at.device) / (width / 2)
    angles = at.float()[:, None] * (1.0 / _LONGEST_WAVE**exponents)
    return torch.cat([angles.sin(), angles.cos()], dim=1)
