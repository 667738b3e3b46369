"""Reads weights from a checkpoint's files by prefix, and gives them to a module that must have exactly these."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from safetensors import safe_open
from torch import Tensor, nn

from gridsieve.common.checkpoint import Checkpoint, is_computed
from gridsieve.common.contract.errors import StartupError
from gridsieve.services.generation.loading.fp8_blocks import fp8_blocks
from gridsieve.services.generation.loading.quantization_config import OF_ACTIVATIONS
from gridsieve.services.generation.model.fp8_linear import FP8
from gridsieve.services.generation.parallel.sharding import Shard

_CPU = torch.device("cpu")
# A matrix of one expert of a layer, as checkpoints of mixtures store them; transformers 5 stacks those of all experts.
_OF_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")


# From the name of a weight in a file to its name in the module; None of one that is not read.
Named: TypeAlias = Callable[[str], str | None]


def as_stored(name: str) -> str:
    """The `Named` of files that have the module's names."""
    return name


def stored_weights(
    checkpoint: Checkpoint, prefix: str, device: torch.device = _CPU, named: Named = as_stored
) -> Iterator[tuple[str, str, Any]]:
    """Each weight whose name starts with `prefix`: its name, that of the rest of it by `named`, and its open file."""
    for path in checkpoint.weight_files:
        with safe_open(path, framework="pt", device=str(device)) as file:
            for full in file.keys():  # noqa: SIM118  (not a dict)
                if is_computed(full) or not full.startswith(prefix):
                    continue
                if (name := named(full.removeprefix(prefix))) is not None:
                    yield full, name, file


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
    named: Named = as_stored,
    rounded: Callable[[str, Tensor], Mapping[str, Tensor]] = lambda name, weight: {name: weight},
) -> dict[str, Tensor]:
    """The weights whose names start with `prefix`, by `named` of the rest. Of those in `shards`, this rank's part.

    dtypes: of those that are not read in `dtype`. Weights stored in fp8 by blocks are dequantised, unless they are to
    stay in it. Matrices of single experts, except these, are stacked, as transformers' classes have them: gate_up_proj
    [experts, 2 · I, D], or up_proj [experts, I, D] of experts without gates; and down_proj [experts, D, I].
    rounded: what is kept of a weight that is no expert's, as soon as it was read.
    Raises StartupError if the shape of a sharded weight is not the one that the config says.
    """
    weights: dict[str, Tensor] = {}
    experts, blocks = _Experts(checkpoint, prefix, named), fp8_blocks(checkpoint)
    for full, name, file in stored_weights(checkpoint, prefix, device, named):
        if blocks.scales and name not in dtypes and (blocks.is_scale(full) or OF_ACTIVATIONS.search(name)):
            continue
        stays = dtypes.get(name) == FP8
        part = name in shards and (stays or full not in blocks.scales)  # else all of it is dequantised
        stored = file.get_slice(full) if part else file.get_tensor(full)
        if not stays:
            stored = blocks.dequantised(full, stored)
        if not part and blocks.is_scale(full) and stored.numel() == 1:  # of a matrix that is one block
            stored = stored.view(1, 1)
        if not stays and (found := _OF_EXPERT.fullmatch(name)):
            for stacked, whole in experts.stack(found, stored.to(dtype)):
                weights[stacked] = _own(stacked, whole, shards, prefix + stacked)
        else:
            weights |= rounded(name, _own(name, stored, shards, full).to(dtypes.get(name, dtype)))
    return weights


def _own(name: str, whole: Any, shards: Mapping[str, Shard], full: str) -> Tensor:
    """whole: a tensor, or a slice of safetensors of a weight in `shards`."""
    try:
        own: Tensor = shards[name].of(whole) if name in shards else whole
    except ValueError as error:
        raise StartupError(f"config.json expects {full} {error}") from error
    return own


class _Experts:
    """Stacks the matrices of experts, a layer as soon as its last one was read: files have them in any order."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, named: Named) -> None:
        self._prefix = prefix
        names = (name for _, name, _ in stored_weights(checkpoint, prefix, named=named))
        self._missing = Counter(found[1] for name in names if (found := _OF_EXPERT.fullmatch(name)))
        self._read: dict[str, dict[tuple[str, int], Tensor]] = {}

    def stack(self, found: re.Match[str], matrix: Tensor) -> list[tuple[str, Tensor]]:
        """The stacked weights of a layer by their names once it is complete; until then none."""
        layer, number, kind = found[1], int(found[2]), found[3]
        read = self._read.setdefault(layer, {})
        read[kind, number] = matrix
        self._missing[layer] -= 1
        if self._missing[layer]:
            return []
        del self._read[layer]
        numbers = range(1 + max(number for _, number in read))
        inner = ("gate_proj", "up_proj") if any(kind == "gate_proj" for kind, _ in read) else ("up_proj",)
        try:
            of_each = [torch.cat([read.pop((kind, each)) for kind in inner]) for each in numbers]
            return [
                (f"{layer}.{'gate_up_proj' if len(inner) == 2 else 'up_proj'}", torch.stack(of_each)),
                (f"{layer}.down_proj", torch.stack([read.pop(("down_proj", each)) for each in numbers])),
            ]
        except KeyError as error:
            kind, number = error.args[0]
            raise StartupError(f"missing weights ['{self._prefix}{layer}.{number}.{kind}.weight']") from error


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
