"""Checkpoints whose linear layers are stored in fp8 by blocks of 128 × 128, as Qwen publishes them, computed as stored.

    q_proj.weight             e4m3 [N, K]
    q_proj.weight_scale_inv   bfloat16 or float32 [N / 128, K / 128]: what a block is multiplied by

What differs from this, experts among it, is dequantised.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.services.generation.loading.fp8_blocks import SCALE, fp8_blocks
from gridsieve.services.generation.loading.quantization_config import quantization_settings
from gridsieve.services.generation.loading.text_model import LM_HEAD_PREFIXES
from gridsieve.services.generation.model.fp8_linear import FP8, GROUP, Fp8Linear, find_product, fits


def keep_fp8(
    checkpoint: Checkpoint, text: Any, prefix: str, dtype: torch.dtype, device: torch.device
) -> dict[str, torch.dtype]:
    """Replaces the linear layers of `text` that the checkpoint stores in fp8 by layers that compute in fp8.

    text: on the meta device. prefix: of its weights. dtype, device: in and on which it will run. Returns the dtypes of
    the layers' weights and scales by name, for `read_weights`; or {}, and leaves `text` as it is, if they must be
    dequantised. Raises StartupError as `fp8_blocks`.
    """
    blocks, settings = fp8_blocks(checkpoint), quantization_settings(checkpoint)
    names = {
        name.removeprefix(prefix).removesuffix(".weight")
        for name in blocks.scales
        if name.startswith((prefix, *LM_HEAD_PREFIXES))
    }
    if (
        blocks.sides != [GROUP, GROUP]
        or settings.get("activation_scheme", "dynamic") != "dynamic"
        or settings.get("scale_fmt", "float") != "float"
    ):
        return {}
    layers = {name: each for name, each in text.named_modules() if name in names and type(each) is nn.Linear}
    if not names or len(layers) < len(names) or not all(map(fits, layers.values())):
        return {}
    sizes = sorted({(each.out_features, each.in_features) for each in layers.values()})
    product = find_product(sizes, torch.zeros((), dtype=dtype, device=device))
    if product is None:
        return {}
    for name, layer in layers.items():
        text.set_submodule(name, Fp8Linear(layer, product))
    weights = {f"{name}.weight": FP8 for name in names}
    return weights | {f"{name}.weight{SCALE}": torch.float32 for name in names}
