"""Which part of each weight a rank holds, and where ranks add up or gather: transformers' own plans and layers.

    colwise   a rank's own rows of the weight       q, k, v: its heads; gate and up; the output layer's tokens
    rowwise   a rank's own columns of the weight    o and down, after which what all computed is added up

transformers keeps such weights as distributed tensors, and unwraps them in each layer's call; here they are a rank's
own plain tensors from the start, which its layers take as well.
Source: `transformers.distributed.tensor_parallel`; Megatron-LM, arXiv 1909.08053.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.distributed.sharding_utils import DtensorShardOperation
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from common.contract.errors import StartupError
from services.generation.parallel.group import Group

# torch's grouped products want rows that begin at multiples of 16 bytes, which so many columns are in any type.
_EXPERT_COLUMNS = 8


@dataclass(frozen=True, slots=True)
class Shard:
    """shape: of the whole weight."""

    shape: tuple[int, ...]
    _operation: Any

    def of(self, whole: Any) -> Tensor:
        """This rank's part of a weight: a tensor, or what safetensors slices a file by, of which no more is read."""
        shape = tuple(whole.shape if isinstance(whole, Tensor) else whole.get_shape())
        if len(shape) == 3 and shape != self.shape == (shape[0], shape[2], shape[1]):
            whole, shape = _Turned(whole), self.shape
        if shape != self.shape:
            raise ValueError(f"{list(self.shape)}, it is {list(shape)}")
        part: Tensor = self._operation.shard_tensor(whole)
        return part.contiguous()


class _Turned:
    """What safetensors slices a file by, its last two axes swapped, as experts are published."""

    def __init__(self, whole: Any) -> None:
        self._whole = whole

    def get_shape(self) -> list[int]:
        first, rows, columns = self._whole.get_shape()
        return [first, columns, rows]

    def __getitem__(self, index: tuple[slice, slice, slice]) -> Tensor:
        first, rows, columns = index
        part: Tensor = self._whole[first, columns, rows]
        return part.transpose(1, 2)


def check_sizes(config: Any, ranks: int) -> None:
    """Raises StartupError if a model's heads, or what its experts compute, cannot be shared out evenly.

    Other sizes need not: the last rank has less of them.
    """
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % ranks or kv_heads % ranks:
        raise StartupError(
            f"--tensor-parallel {ranks} must divide the model's {heads} attention heads and {kv_heads} KV heads"
        )
    width = getattr(config, "moe_intermediate_size", 0)
    if width % (ranks * _EXPERT_COLUMNS):  # else the first step fails
        raise StartupError(
            f"--tensor-parallel {ranks} must divide the {width} columns of the model's experts into multiples of "
            f"{_EXPERT_COLUMNS}"
        )


def shard(module: nn.Module, plan: Mapping[str, str], group: Group) -> dict[str, Shard]:
    """Has a module on the meta device hold and compute this rank's part, as the plan says.

    plan: styles of transformers' by names of modules and parameters, every layer's by itself.
    Returns what is this rank's of each weight that is not whole, by name.
    """
    apply_tensor_parallelism(module, group.mesh, dict(plan))
    shards = {}
    for name, parameter in list(module.named_parameters()):
        if isinstance(parameter, DTensor):
            shards[name] = Shard(tuple(parameter.shape), DtensorShardOperation(parameter))
            owner, _, own = name.rpartition(".")
            module.get_submodule(owner)._parameters[own] = nn.Parameter(
                torch.empty(parameter.to_local().shape, dtype=parameter.dtype, device="meta"), requires_grad=False
            )
    return shards


def part(whole: Tensor, axis: int, group: Group) -> Tensor:
    """This rank's part of what belongs to a weight that is shared out along an axis: the last have less, or none."""
    length = whole.shape[axis]
    most = -(-length // group.ranks)
    start = min(group.rank * most, length)
    return whole.narrow(axis, start, min(most, length - start)).clone()


def layers_plan(text: Any, plan: Mapping[str, str] | None, ranks: int) -> dict[str, str]:
    """A plan for every layer of a text model, of one that has * in their numbers' place.

    Raises StartupError if transformers has none.
    """
    if not plan:
        raise StartupError(f"--tensor-parallel {ranks}: transformers has no plan for {type(text).__name__}")
    expanded: dict[str, str] = text._expand_parallel_plan(dict(plan))
    return expanded
