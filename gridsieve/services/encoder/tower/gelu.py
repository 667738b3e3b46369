"""GELU's tanh approximation by an exponential, of which vectorised code takes half the time of a tanh.

    x (1 + tanh u) / 2  =  x / (1 + exp(−2u)),  u = √(2/π) (x + 0.044715 x³)

Source: arXiv 1606.08415, section 2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import GELUTanh


def gelu_by_exp(layers: Iterable[nn.Module]) -> None:
    """Replaces the function in layers of transformers, in place. Uncompiled they compute as before, in one operator."""
    for module in (module for layer in layers for module in layer.modules()):
        if isinstance(module, GELUTanh):
            module.act = _gelu


def _gelu(rows: Tensor) -> Tensor:
    if not torch.compiler.is_compiling():
        return F.gelu(rows, approximate="tanh")
    wide = rows.float()
    return (wide * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3))).to(rows.dtype)
