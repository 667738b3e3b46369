"""Saturating arithmetic for float16 towers: values beyond float16 become its largest value instead of infinity.

    block:  x ── norm ── attention ──(+)──┬── norm ── mlp ──(+)──▶       both sums are clamped, and the inputs and
            └─────────────────────────┘   └───────────────┘             outputs of every linear layer

An infinity would become NaN in the next norm, in its token and then in its whole slice. Queries and keys are clamped
to a smaller value: a rotary embedding rotates pairs of their values, so that one may become as large as the length of
the pair. Weights are clamped too. bfloat16 and float32 have range enough for any tower.
It knows no family: the blocks of all families have these parts.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from gridsieve.services.encoder.tower.patches import FoldedPatchEmbed

_MAX = torch.finfo(torch.float16).max
# The largest float16 value up to √½ of it: a pair of such values is no longer than _MAX.
_MAX_ROTATED = 32.0 * math.floor(_MAX / math.sqrt(2) / 32)


def saturate(model: Any) -> None:
    """Makes a float16 tower of transformers saturate, in place."""
    for parameter in model.parameters():
        _clamp(parameter.data)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = _SaturatingBlock(block)
        if hasattr(block.attn, "qkv"):
            block.attn.qkv.register_forward_hook(_clamp_queries_and_keys)
        else:
            for linear in (block.attn.q, block.attn.k):
                linear.register_forward_hook(_clamp_rotated)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d | FoldedPatchEmbed):
            module.register_forward_hook(_clamp_output)
        if isinstance(module, nn.Linear | nn.Conv2d):
            module.register_forward_pre_hook(_clamp_input)


class _SaturatingBlock(nn.Module):
    """A transformers block with clamped residual sums."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = block.norm1, block.attn, block.norm2, block.mlp

    def forward(self, hidden: Tensor, **keywords: Any) -> Tensor:
        hidden = _clamp(hidden)
        hidden = _clamp(hidden + self.attn(self.norm1(hidden), **keywords))
        return _clamp(hidden + self.mlp(self.norm2(hidden)))


def _clamp(values: Tensor) -> Tensor:
    return values.clamp_(-_MAX, _MAX)


def _clamp_input(module: nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
    return (_clamp(given[0]),)


def _clamp_output(module: nn.Module, given: tuple[Tensor], returned: Tensor) -> Tensor:
    return _clamp(returned)


def _clamp_queries_and_keys(module: nn.Module, given: tuple[Tensor], returned: Tensor) -> Tensor:
    """returned: (P, 3 · hidden), queries and keys before values."""
    _clamp_rotated(module, given, returned[:, : 2 * returned.shape[1] // 3])
    return returned


def _clamp_rotated(module: nn.Module, given: tuple[Tensor], returned: Tensor) -> Tensor:
    return returned.clamp_(-_MAX_ROTATED, _MAX_ROTATED)
