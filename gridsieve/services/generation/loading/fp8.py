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
from gridsieve.services.generation.loading.fp8_blocks import SCALE
from gridsieve.services.generation.loading.quantization_config import quantization_settings
from gridsieve.services.generation.loading.text_model import LM_HEAD_PREFIXES
from gridsieve.services.generation.loading.weights import stored_weights
from gridsieve.services.generation.model.fp8_linear import FP8, GROUP, Fp8Linear, find_product, fits

_SCALES = f".weight{SCALE}"
_DTYPE = "F8_E4M3"  # as safetensors names it


def keep_fp8(
    checkpoint: Checkpoint, text: Any, prefix: str, dtype: torch.dtype, device: torch.device
) -> dict[str, torch.dtype]:
    """Replaces the linear layers of `text` that the checkpoint stores in fp8 by layers that compute in fp8.

    text: on the meta device. prefix: of its weights. dtype, device: in and on which it will run. Returns the dtypes of
    the layers' weights and scales by name, for `read_weights`; or {}, and leaves `text` as it is, if they must be
    dequantised.
    """
    names = _stored(checkpoint, prefix)
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
    return weights | {f"{name}{_SCALES}": torch.float32 for name in names}


def _stored(checkpoint: Checkpoint, prefix: str) -> set[str]:
    """Names of the layers that are stored in fp8: those of the text model without `prefix`, and the output layer.

    Empty if the checkpoint's format is not the one above.
    """
    settings = quantization_settings(checkpoint)
    if (
        settings.get("quant_method") != "fp8"
        or settings.get("weight_block_size") != [GROUP, GROUP]
        or settings.get("activation_scheme", "dynamic") != "dynamic"
        or settings.get("scale_fmt", "float") != "float"
    ):
        return set()
    stored: set[str] = set()
    scaled: set[str] = set()
    for full, _, file in stored_weights(checkpoint, ""):
        if not full.startswith((prefix, *LM_HEAD_PREFIXES)):
            continue
        name = full.removeprefix(prefix)
        if name.endswith(_SCALES):
            scaled.add(name.removesuffix(_SCALES))
        elif file.get_slice(full).get_dtype() == _DTYPE:
            stored.add(name.removesuffix(".weight"))
    return stored if scaled <= stored else set()
