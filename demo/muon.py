"""Muon with products in float32: torch's are in bfloat16, which processors without its instructions compute slowly.

Source: torch.optim.Muon, whose options and state it keeps, with `adjust_lr_fn="match_rms_adamw"`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


class Muon(torch.optim.Muon):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            momentum = group["momentum"]
            for parameter in group["params"]:
                if (gradient := parameter.grad) is None:
                    continue
                state = self.state[parameter]
                mean = state.setdefault("momentum_buffer", torch.zeros_like(gradient))
                mean.lerp_(gradient, 1 - momentum)
                update = _orthogonal(gradient.lerp(mean, momentum), group)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(parameter.shape)))


def _orthogonal(matrix: Tensor, group: dict[str, Any]) -> Tensor:
    """The nearest matrix with singular values about 1, by the iteration of Newton and Schulz."""
    a, b, c = group["ns_coefficients"]
    upright = matrix.shape[0] > matrix.shape[1]
    found = matrix.T if upright else matrix
    found = found / found.norm().clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.T if upright else found
