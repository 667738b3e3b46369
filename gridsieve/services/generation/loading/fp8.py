"""Linear layers in fp8. On a card with products in fp8, all layers with blocks of 128 × 128 stay in fp8, whether Qwen
published them so or `--quantization fp8` rounded them. Elsewhere, and with other blocks, experts stay in fp8, and the
other layers are dequantised while they are read.

    q_proj.weight             e4m3 [N, K]
    q_proj.weight_scale_inv   bfloat16 or float32 [N / 128, K / 128]: what a block is multiplied by
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.services.generation.loading.experts import separate_experts, without_others
from gridsieve.services.generation.loading.fp8_blocks import fp8_blocks
from gridsieve.services.generation.loading.quantization_config import quantization_settings
from gridsieve.services.generation.loading.text_model import LM_HEAD_PREFIXES, in_float32
from gridsieve.services.generation.loading.weights import as_stored
from gridsieve.services.generation.model.fp8_linear import (
    FP8,
    GROUP,
    SCALE,
    Fp8Linear,
    Product,
    dequantised,
    dequantising,
    find_product,
    fits,
    quantise_weight,
)
from gridsieve.services.generation.parallel.group import Group
from gridsieve.services.generation.parallel.sharding import parts_of


def keep_fp8(
    checkpoint: Checkpoint,
    text: Any,
    prefix: str,
    dtype: torch.dtype,
    device: torch.device,
    group: Group | None = None,
    plan: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, torch.dtype]:
    """Replaces the linear layers of `text` that stay in fp8, and experts that the checkpoint stores in fp8.

    text: on the meta device. prefix: of its weights. dtype, device: in and on which it will run. plan: by which the
    ranks of the group will divide it, see `shard`. Returns the dtypes of the stored weights and scales of these layers
    by name, for `read_weights`. Raises StartupError as `fp8_blocks`.
    """
    blocks = fp8_blocks(checkpoint)
    names = {name.removeprefix(prefix) for name in blocks.scales if name.startswith((prefix, *LM_HEAD_PREFIXES))}
    stacked = separate_experts(text, names, group)
    names = set(filter(without_others(text, as_stored), names))
    own = {name: stacked.get(name, [name.removesuffix(".weight")]) for name in names}
    linears = {name: each for name, each in text.named_modules() if type(each) is nn.Linear}
    kept = {name: layers for name, layers in own.items() if all(each in linears for each in layers)}
    sizes = set()
    for name in (each for layers in kept.values() for each in layers):
        rows, columns = parts_of(text, name, plan, group)
        sizes.add((linears[name].out_features / rows, linears[name].in_features / columns))
    product = _product(checkpoint, sizes, dtype, device) if names and len(kept) == len(names) else None
    if product is None:
        kept = {name: layers for name, layers in kept.items() if ".experts." in name}
        product = dequantising(blocks.sides)
    for name in (each for layers in kept.values() for each in layers):
        text.set_submodule(name, Fp8Linear(linears[name], product, blocks.sides, blocks.scale))
    return dict.fromkeys(kept, FP8) | {f"{name}{blocks.scale}": torch.float32 for name in kept}


def _product(
    checkpoint: Checkpoint, sizes: Collection[tuple[float, float]], dtype: torch.dtype, device: torch.device
) -> Product | None:
    """The card's product, if it has one for the blocks and sizes of layers.

    sizes: outputs and inputs of a rank's part of each, which are no whole numbers if they cannot be divided.
    """
    settings = quantization_settings(checkpoint)
    if (
        settings.get("quant_method") != "fp8"
        or fp8_blocks(checkpoint).sides != [GROUP, GROUP]
        or settings.get("activation_scheme", "dynamic") != "dynamic"
        or settings.get("scale_fmt", "float") != "float"
        or any(side % GROUP for size in sizes for side in size)
    ):
        return None
    whole = sorted((int(outputs), int(inputs)) for outputs, inputs in sizes)
    return find_product(whole, torch.zeros((), dtype=dtype, device=device))


class RoundedToFp8:
    """The linear layers of `text`, on the meta device, whose weights are rounded to fp8: those of multiples of 128.

    dtype, device: as in `keep_fp8`. Raises StartupError if there is no such layer.
    """

    def __init__(self, text: Any, dtype: torch.dtype, device: torch.device) -> None:
        gates = in_float32(text, dtype)
        layers = {
            name: each
            for name, each in text.named_modules()
            if type(each) is nn.Linear and fits(each) and f"{name}.weight" not in gates
        }
        if not layers:
            raise StartupError(f"--quantization fp8: no linear layer has multiples of {GROUP} inputs and outputs")
        self._names = {f"{name}.weight" for name in layers}
        sizes = {(each.out_features, each.in_features) for each in layers.values()}
        product = find_product(sorted(sizes), torch.zeros((), dtype=dtype, device=device))
        self._stay = product is not None
        if product is not None:
            for name, layer in layers.items():
                text.set_submodule(name, Fp8Linear(layer, product))

    def rounded(self, name: str, weight: Tensor) -> dict[str, Tensor]:
        """What the model has of a weight that was read, by name."""
        if name not in self._names:
            return {name: weight}
        values, scales = quantise_weight(weight)
        if self._stay:
            return {name: values, name + SCALE: scales}
        return {name: dequantised(values, scales, (GROUP, GROUP)).to(weight.dtype)}
