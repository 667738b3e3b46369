"""Saturating arithmetic for float16 towers: values beyond float16 become its largest value instead of infinity.

    x ─▶ clamp ─▶ module with weights ─▶ clamp ─▶ …      linear layers, norms, embeddings of patches
         └─▶ the residual: the same tensor, clamped too

Sums and products of finite values are finite or infinite, but never NaN. The next norm, product or attention would make
NaN of an infinity, in its token and then in its whole slice. Each of these begins or ends at a module with weights,
whose inputs and outputs are clamped, in place: what a norm reads is also the residual, to which the layer adds next.
Attention clamps queries and keys itself, after rotary embeddings. Weights are clamped too. bfloat16 and float32 have
range enough for any tower.
It knows no family.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_MAX = torch.finfo(torch.float16).max


def saturate(model: nn.Module) -> None:
    """Makes the modules of a float16 tower saturate, in place.

    On CUDA products of this process are summed in float32 from now on: by default cuBLAS may add parts of a sum in
    float16, of which two can be infinities of both signs.
    """
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    for weights in (*model.parameters(), *model.buffers()):
        if weights.is_floating_point():
            weights.data.clamp_(-_MAX, _MAX)
    for module in model.modules():
        if module is model or any(True for _ in module.parameters(recurse=False)):
            module.register_forward_pre_hook(_saturate_inputs)
            module.register_forward_hook(_saturate_output)


def saturated(values: Tensor) -> Tensor:
    """The same tensor, clamped in place if it is float16."""
    return values.clamp_(-_MAX, _MAX) if values.dtype == torch.float16 else values


def _saturate_inputs(module: nn.Module, given: tuple[Any, ...]) -> None:
    for each in given:
        if isinstance(each, Tensor):
            saturated(each)


def _saturate_output(module: nn.Module, given: tuple[Any, ...], returned: Any) -> None:
    if isinstance(returned, Tensor):
        saturated(returned)
