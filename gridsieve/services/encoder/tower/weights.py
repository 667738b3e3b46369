"""Weights of a tower: found by prefix in a checkpoint's files, read to the device, checked against the module.

It knows no family: a family's file makes the module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors import safe_open
from torch import Tensor, nn

from gridsieve.common.checkpoint import Checkpoint, is_computed
from gridsieve.common.contract.errors import StartupError
from gridsieve.services.compute.device import TORCH_DTYPES, multiplies_bfloat16, name_of
from gridsieve.services.encoder.tower.saturation import saturated

_KEYS_NAMED = 5  # in an error
_STORED = ("F64", "F32", "F16", "BF16")
_DTYPES = {name_of(dtype): dtype for dtype in TORCH_DTYPES.values()}


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a checkpoint's file. name: its full name there. dtype: by safetensors' name."""

    path: Path
    name: str
    dtype: str


def find_weights(checkpoint: Checkpoint, prefixes: Sequence[str]) -> dict[str, Stored]:
    """The tensors under the first of `prefixes` that occurs in the checkpoint, by name without the prefix."""
    found: dict[str, dict[str, Stored]] = {prefix: {} for prefix in prefixes}
    for path in checkpoint.weight_files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a dict)
                prefix = next((each for each in prefixes if name.startswith(each)), None)
                if prefix is not None and not is_computed(name):
                    stored = Stored(path, name, file.get_slice(name).get_dtype())
                    found[prefix][name.removeprefix(prefix)] = stored
    return next((weights for weights in found.values() if weights), {})


def find_parts(checkpoint: Checkpoint, parts: Sequence[str]) -> dict[str, Stored]:
    """The tensors under these prefixes of modules, by name with the prefix, before which `model.` may stand."""
    found = {part: find_weights(checkpoint, (f"model.{part}", part)) for part in parts}
    return {part + name: each for part, weights in found.items() for name, each in weights.items()}


def read_weights(
    stored: Mapping[str, Stored],
    dtype: torch.dtype,
    device: torch.device,
    patch_embed: str | None = None,
    cuts: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType({}),
) -> dict[str, Tensor]:
    """Reads tensors one by one, straight to the device, and converts them to `dtype`.

    Those whose names start with `patch_embed` keep their stored dtype: normalisation is folded into them before they
    are rounded. None: the tower has no such weights. cuts: by name, what makes of a tensor the part that is kept.
    """
    weights: dict[str, Tensor] = {}
    for path in {each.path for each in stored.values()}:
        with safe_open(path, framework="pt", device=str(device)) as file:
            for name, each in stored.items():
                if each.path == path:
                    tensor = file.get_tensor(each.name)
                    if name in cuts:
                        tensor = cuts[name](tensor)
                    if not (patch_embed and name.startswith(patch_embed)):
                        tensor = saturated(tensor.to(dtype))
                    weights[name] = tensor
    return weights


def fill(module: nn.Module, weights: dict[str, Tensor], dtype: torch.dtype, tower: str = "vision tower") -> None:
    """Puts `weights` into a module that was made on the meta device. tower: what it is called in errors.

    Raises StartupError naming the tensors that are missing, unknown to the module, or of another shape.
    """
    expected = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    wrong = [
        f"{name} has the shape {list(weights[name].shape)}, the config says {list(shape)}"
        for name, shape in expected.items()
        if name in weights and tuple(weights[name].shape) != shape
    ]
    complaints = {
        "lacks": sorted(expected.keys() - weights.keys()),
        "has unknown": sorted(weights.keys() - expected.keys()),
        "does not fit its config:": wrong,
    }
    found = [f"{what} {_first_of(names)}" for what, names in complaints.items() if names]
    if found:
        raise StartupError(f"the checkpoint's {tower} {'; it '.join(found)}")
    module.load_state_dict({name: tensor.to(dtype) for name, tensor in weights.items()}, assign=True)


def choose_dtype(stored: Mapping[str, Stored], wanted: str, device: torch.device) -> torch.dtype:
    """The dtype to run in: `wanted`, or for "auto" bfloat16 if every tensor is stored so and the device can multiply
    it, else float32.

    Raises StartupError for a quantised tower.
    """
    for each in stored.values():
        if each.dtype not in _STORED:
            raise StartupError(
                f"the checkpoint's tower is quantised, {each.name} to {each.dtype}; only the language model's weights "
                f"may be"
            )
    if wanted != "auto":
        return _DTYPES[wanted]
    suits = device.type != "cpu" or multiplies_bfloat16()
    return torch.bfloat16 if suits and {each.dtype for each in stored.values()} == {"BF16"} else torch.float32


def _first_of(names: Sequence[str]) -> str:
    more = len(names) - _KEYS_NAMED
    return ", ".join(names[:_KEYS_NAMED]) + (f" and {more} more" if more > 0 else "")
