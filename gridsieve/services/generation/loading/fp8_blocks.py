"""Weights that a checkpoint stores in fp8 with a scale for each block of rows and columns, and what they stand for.

    q_proj.weight             e4m3 [.., N, K]
    q_proj.weight_scale_inv   a float [.., ⌈N / rows⌉, ⌈K / columns⌉]; the one at [n // rows, k // columns] is of row n
                              and column k

So the last block of rows or columns may be a partial one. transformers 5.24 divides the rows evenly among the scales.
In compressed-tensors the scales are `weight_scale`, and a block may be a whole row ("channel") or a whole matrix
("tensor"). Rows that it would round, too, are multiplied as they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.services.generation.loading.quantization_config import (
    OF_ACTIVATIONS,
    compressed_groups,
    quantization_settings,
)
from gridsieve.services.generation.model.fp8_linear import SCALE, dequantised, grid

_WEIGHT_DTYPE, _SCALE_DTYPES = "F8_E4M3", ("F32", "BF16", "F16")  # as safetensors names them
_BITS = 8
# Where the file does not say.
_SIDES = [128, 128]


@dataclass(frozen=True, slots=True)
class Fp8Blocks:
    """sides: rows and columns of a block, 0 for all. scales: the files that have the scales of weights, by the weights'
    names. scale: what follows these in the names of the scales."""

    sides: Sequence[int]
    scales: Mapping[str, Path]
    scale: str = SCALE

    def is_scale(self, name: str) -> bool:
        return name.endswith(self.scale) and name.removesuffix(self.scale) in self.scales

    def dequantised(self, name: str, weight: Any) -> Any:
        """A weight that is stored in fp8 in float32, any other as it is."""
        if name not in self.scales:
            return weight
        with safe_open(self.scales[name], framework="pt", device=str(weight.device)) as file:
            scales = file.get_tensor(name + self.scale).float()
        return dequantised(weight, scales.view(grid(weight.shape, self.sides)), self.sides)


def fp8_blocks(checkpoint: Checkpoint) -> Fp8Blocks:
    """Those of a checkpoint; without scales if it is not quantised, or a weight is in another format.

    Raises StartupError, with the names, for weights without scales.
    """
    settings = quantization_settings(checkpoint)
    is_fp8 = settings.get("quant_method") == "fp8"
    sides = settings.get("weight_block_size", _SIDES) if is_fp8 else _compressed_sides(settings)
    if not isinstance(sides, list) or len(sides) != len(_SIDES):
        return Fp8Blocks((), {})
    scale = SCALE if is_fp8 else "_scale"
    files: dict[str, Path] = {}
    dtypes: dict[str, str] = {}
    shapes: dict[str, list[int]] = {}
    for path in checkpoint.weight_files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a dict)
                each = file.get_slice(name)
                files[name], dtypes[name], shapes[name] = path, each.get_dtype(), each.get_shape()
    weights = {name for name, dtype in dtypes.items() if dtype == _WEIGHT_DTYPE}
    scaled = {name.removesuffix(scale) for name in files if name.endswith(scale) and not OF_ACTIVATIONS.search(name)}
    if scaled and (missing := sorted(weights - scaled)):
        raise StartupError(
            f"config.json and the weights disagree: missing weights {[name + scale for name in missing]}"
        )
    fit = weights == scaled and all(
        dtypes[name + scale] in _SCALE_DTYPES and _are_of(shapes[name + scale], grid(shapes[name], sides))
        for name in weights
    )
    return Fp8Blocks(sides, {name: files[name + scale] for name in weights if fit}, scale)


def _are_of(shape: Sequence[int], blocks: Sequence[int]) -> bool:
    """Whether scales are those of the blocks; the only one of a matrix may have any number of axes."""
    return shape == blocks or math.prod(shape) == math.prod(blocks) == 1


def _compressed_sides(settings: Mapping[str, Any]) -> Any:
    """Those of a block in compressed-tensors, if all layers have the same; else None."""
    found: list[Any] = []
    for weights in (each["weights"] for each in compressed_groups(settings, "float-quantized")):
        strategies = {"tensor": [0, 0], "channel": [1, 0], "block": weights.get("block_structure")}
        found.append(strategies.get(str(weights.get("strategy"))) if weights.get("num_bits") == _BITS else None)
    return found[0] if found and all(each == found[0] for each in found) else None
