"""MiniCPM-V's resampler: learned queries attend to the patches of a slice, so each becomes as many tokens.

    keys    patches + positions + times      values    patches without them
    2-D positions: columns in the first half of the channels, rows in the second, sines before cosines
    times: sines of a frame's time in the first half of the channels, cosines in the second

A slice is a picture, or a group of frames that the queries attend to together (4.5). Positions are computed, not looked
up, so a picture may have any number of rows and columns.
Source: the published `resampler.py` of openbmb/MiniCPM-V-2_6 and MiniCPM-V-4_5; Q-Former-like resampling, arXiv
2308.12966.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from gridsieve.services.encoder.tower.attention import Attend
from gridsieve.services.encoder.tower.packing import Array, PackedLayout, Side, TowerShape, ends_of

_HEAD_DIM = 128
_EPSILON = 1e-6
_LONGEST_WAVE = 10_000.0


@dataclass(frozen=True, slots=True)
class ResamplerShape(TowerShape):
    """queries: tokens of each slice, whatever its size. timed: whether patches have the time of their frame."""

    queries: int = 0
    timed: bool = False

    def tokens(self, sides: Sequence[Side]) -> int:
        return len(sides) * self.queries

    def by_row(self, sides: Sequence[Side], rows: Sequence[int]) -> Mapping[str, Array]:
        """times: int64 (P,), the numbered time of each patch's frame."""
        return {"times": np.repeat([time for side in sides for time in side.times], rows)} if self.timed else {}

    def own_ends(self, sides: Sequence[Side], rows: Sequence[int]) -> Mapping[str, Array]:
        """queries: ends of slices in queries. slices: ends of slices in patches, where they may have several frames."""
        queries = {"queries": ends_of([self.queries] * len(sides))}
        return {**queries, "slices": ends_of(rows)} if self.timed else queries


class _Attention(nn.Module):
    """The products of `torch.nn.MultiheadAttention` as linear layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = heads, width // heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(width, width) for _ in range(4))


class Resampler(nn.Module):
    """queries: of each slice. width: of the language model. patch_width: of the tower."""

    def __init__(self, queries: int, width: int, patch_width: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.empty(queries, width))
        self.kv_proj = nn.Identity() if patch_width == width else nn.Linear(patch_width, width, bias=False)
        self.attn = _Attention(width, width // _HEAD_DIM)
        self.ln_q, self.ln_kv, self.ln_post = (nn.LayerNorm(width, eps=_EPSILON) for _ in range(3))
        self.proj = nn.Linear(width, width, bias=False)

    def forward(self, patches: Tensor, layout: PackedLayout[Tensor], attend: Attend) -> Tensor:
        """Tokens (S · queries, width) of S slices; rows after the last slice's belong to none.

        patches: (P, patch_width), packed as `layout` says.
        """
        values = self.ln_kv(self.kv_proj(patches))
        keys = values + place_embeddings(layout.positions, values.shape[-1]).to(values.dtype)
        ends, longest = layout.ends, layout.longest
        if "times" in layout.by_row:
            keys = keys + time_embeddings(layout.by_row["times"], values.shape[-1]).to(values.dtype)
            # The length of all keys bounds that of a slice. It adds no blocks of threads to a kernel: only queries do.
            ends, longest = layout.own_ends["slices"], len(keys)
        heads = (self.attn.num_heads, self.attn.head_dim)
        query = self.attn.q_proj(self.ln_q(self.query))
        query_ends = layout.own_ends["queries"]
        slices = query_ends.shape[0] - 1
        attended = attend(
            query.repeat(slices, 1).unflatten(1, heads),
            self.attn.k_proj(keys).unflatten(1, heads),
            self.attn.v_proj(values).unflatten(1, heads),
            query_ends,
            ends,
            query.shape[0],
            longest,
        )
        tokens: Tensor = self.proj(self.ln_post(self.attn.out_proj(attended.flatten(1))))
        return tokens


def as_linear_layers(weights: dict[str, Tensor]) -> None:
    """Makes the weights of linear layers of those of a resampler as they are stored, in place.

    Stored are the weights of queries, keys and values as one, and the last product's as (inputs, outputs).
    """
    for name in [name for name in weights if ".attn.in_proj_" in name]:
        for part, own in zip("qkv", weights.pop(name).chunk(3), strict=True):
            weights[name.replace("in_proj_", f"{part}_proj.")] = own
    for name in [name for name in weights if name.endswith(".proj")]:
        weights[f"{name}.weight"] = weights.pop(name).T.contiguous()


def place_embeddings(places: Tensor, width: int) -> Tensor:
    """Sines and cosines of columns, then of rows: (P, 2), row and column, to float32 (P, width)."""
    row, column = places.unbind(1)
    return torch.cat([_waves(column, width // 2), _waves(row, width // 2)], dim=1)


def time_embeddings(times: Tensor, width: int) -> Tensor:
    """Sines, then cosines, of numbered times, int64 (P,): float32 (P, width); zeros for those below 0."""
    return _waves(times, width) * (times >= 0)[:, None]


def _waves(at: Tensor, width: int) -> Tensor:
    exponents = torch.arange(width // 2, dtype=torch.float32, device=at.device) / (width / 2)
    angles = at.float()[:, None] * (1.0 / _LONGEST_WAVE**exponents)
    return torch.cat([angles.sin(), angles.cos()], dim=1)
