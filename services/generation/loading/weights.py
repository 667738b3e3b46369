"""Reads weights from a checkpoint's files by prefix, and gives them to a module that must have exactly these."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from framesieve.common.checkpoint import Checkpoint
from framesieve.common.contract.errors import StartupError
from framesieve.services.generation.parallel.sharding import Shard

_CPU = torch.device("cpu")


def stored_weights(checkpoint: Checkpoint, prefix: str, device: torch.device = _CPU) -> Iterator[tuple[str, str, Any]]:
    """Each weight whose name starts with `prefix`: its name, the name without the prefix, and its open file."""
    for path in checkpoint.weight_files:
        with safe_open(path, framework="pt", device=str(device)) as file:
            for full in file.keys():  # noqa: SIM118  (not a dict)
                if full.startswith(prefix):
                    yield full, full.removeprefix(prefix), file


def has_weights(checkpoint: Checkpoint, prefix: str) -> bool:
    """Whether any weight's name starts with `prefix`."""
    return any(True for _ in stored_weights(checkpoint, prefix))


def read_weights(
    checkpoint: Checkpoint,
    prefix: str,
    dtype: torch.dtype,
    device: torch.device,
    shards: Mapping[str, Shard],
    dtypes: Mapping[str, torch.dtype] = MappingProxyType({}),
) -> dict[str, Tensor]:
    """The weights whose names start with `prefix`, by the rest of their names. Of those in `shards`, this rank's part.

    dtypes: of those that are not read in `dtype`.
    Raises StartupError if the shape of a sharded weight is not the one that the config says.
    """
    weights: dict[str, Tensor] = {}
    for full, name, file in stored_weights(checkpoint, prefix, device):
        try:
            own = shards[name].of(file.get_slice(full)) if name in shards else file.get_tensor(full)
        except ValueError as error:
            raise StartupError(f"config.json expects {full} {error}") from error
        weights[name] = own.to(dtypes.get(name, dtype))
    return weights


def fill(module: nn.Module, weights: dict[str, Tensor], prefix: str) -> None:
    """Assigns `weights` to a module. Raises StartupError, with their names, if names or shapes differ."""
    shapes = {name: tensor.shape for name, tensor in module.state_dict().items()}
    missing = [prefix + name for name in sorted(shapes.keys() - weights.keys())]
    unknown = [prefix + name for name in sorted(weights.keys() - shapes.keys())]
    if missing or unknown:
        raise StartupError(
            f"config.json and the weights disagree: missing weights {missing}, unknown weights {unknown}"
        )
    for name, shape in shapes.items():
        if weights[name].shape != shape:
            raise StartupError(f"config.json expects {prefix + name} {list(shape)}, got {list(weights[name].shape)}")
    module.load_state_dict(weights, assign=True)
