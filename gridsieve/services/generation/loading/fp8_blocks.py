"""Weights that a checkpoint stores in fp8 with a scale for each block of rows and columns, and what they stand for.

    q_proj.weight             e4m3 [.., N, K]
    q_proj.weight_scale_inv   a float [.., ⌈N / rows⌉, ⌈K / columns⌉]; the one at [n // rows, k // columns] is of row n
                              and column k

So the last block of rows or columns may be a partial one. transformers 5.24 divides the rows evenly among the scales.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.services.generation.loading.quantization_config import quantization_settings

SCALE = "_scale_inv"  # after the name of the weight
_WEIGHT_DTYPE, _SCALE_DTYPES = "F8_E4M3", ("F32", "BF16", "F16")  # as safetensors names them
# Where the file does not say.
_SIDES = [128, 128]


@dataclass(frozen=True, slots=True)
class Fp8Blocks:
    """sides: rows and columns of a block. scales: the files that have the scales of weights, by the weights' names."""

    sides: Sequence[int]
    scales: Mapping[str, Path]

    def dequantised(self, name: str, weight: Any) -> Any:
        """A weight that is stored in fp8 in float32, any other as it is."""
        if name not in self.scales:
            return weight
        with safe_open(self.scales[name], framework="pt", device=str(weight.device)) as file:
            scale = file.get_tensor(name + SCALE).float()
        for axis, side in zip((-2, -1), self.sides, strict=True):
            scale = scale.repeat_interleave(side, axis).narrow(axis, 0, weight.shape[axis])
        return weight.float() * scale


def fp8_blocks(checkpoint: Checkpoint) -> Fp8Blocks:
    """Those of a checkpoint; without scales if it is not quantised, or a weight is in another format.

    Raises StartupError, with the names, for weights without scales.
    """
    settings = quantization_settings(checkpoint)
    sides = settings.get("weight_block_size", _SIDES)
    if settings.get("quant_method") != "fp8" or not isinstance(sides, list) or len(sides) != len(_SIDES):
        return Fp8Blocks((), {})
    files: dict[str, Path] = {}
    dtypes: dict[str, str] = {}
    shapes: dict[str, list[int]] = {}
    for path in checkpoint.weight_files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a dict)
                each = file.get_slice(name)
                files[name], dtypes[name], shapes[name] = path, each.get_dtype(), each.get_shape()
    weights = {name for name, dtype in dtypes.items() if dtype == _WEIGHT_DTYPE}
    scaled = {name.removesuffix(SCALE) for name in files if name.endswith(SCALE)}
    if scaled and (missing := sorted(weights - scaled)):
        raise StartupError(
            f"config.json and the weights disagree: missing weights {[name + SCALE for name in missing]}"
        )
    fit = weights == scaled and all(
        dtypes[name + SCALE] in _SCALE_DTYPES and shapes[name + SCALE] == _grid(shapes[name], sides) for name in weights
    )
    return Fp8Blocks(sides, {name: files[name + SCALE] for name in weights if fit})


def _grid(shape: Sequence[int], sides: Sequence[int]) -> list[int]:
    """The shape of the scales of a weight."""
    return [*shape[:-2], *(-(-size // side) for size, side in zip(shape[-2:], sides, strict=True))]
