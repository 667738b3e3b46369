"""Float16 towers that saturate: what is larger than float16 holds becomes its largest value, and no infinity.

    block:  x ── norm ── attention ──(+)──┬── norm ── mlp ──(+)──▶       both sums are kept in range, and what enters
            └─────────────────────────┘   └───────────────┘             and leaves every linear layer

An infinity would become NaN in the next norm, of this token and then of its whole slice. Queries and keys end sooner:
rotary turns pairs of their values, which makes one of a pair as large as the pair was long. Weights end there as well.
bfloat16 and float32 reach further than any tower. It knows no family: blocks of both have these parts.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from services.encoder.tower.patches import FoldedPatchEmbed

_MOST = torch.finfo(torch.float16).max
# A pair of such values is no longer than that: the largest that float16 has up to √½ of it.
_MOST_TURNED = 32.0 * math.floor(_MOST / math.sqrt(2) / 32)


def saturate(model: Any) -> None:
    """Changes a float16 tower of transformers in place."""
    for parameter in model.parameters():
        _clamp(parameter.data)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = _SaturatingBlock(block)
        block.attn.qkv.register_forward_hook(_clamp_turned)
    for module in model.modules():
        if isinstance(module, nn.Linear | FoldedPatchEmbed):
            module.register_forward_hook(_clamp_output)
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(_clamp_input)


class _SaturatingBlock(nn.Module):
    """A block's own parts, its residual sums kept in range."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = block.norm1, block.attn, block.norm2, block.mlp

    def forward(self, hidden: Tensor, **told: Any) -> Tensor:
        hidden = _clamp(hidden)
        hidden = _clamp(hidden + self.attn(self.norm1(hidden), **told))
        return _clamp(hidden + self.mlp(self.norm2(hidden)))


def _clamp(values: Tensor) -> Tensor:
    return values.clamp_(-_MOST, _MOST)


def _clamp_input(module: nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
    return (_clamp(given[0]),)


def _clamp_output(module: nn.Module, given: tuple[Tensor], returned: Tensor) -> Tensor:
    return _clamp(returned)


def _clamp_turned(module: nn.Module, given: tuple[Tensor], returned: Tensor) -> Tensor:
    """returned: (P, 3 · hidden), queries and keys before values."""
    returned[:, : 2 * returned.shape[1] // 3].clamp_(-_MOST_TURNED, _MOST_TURNED)
    return returned
