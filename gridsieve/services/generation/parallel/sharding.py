"""Shards a model's weights among ranks, by transformers' own tensor-parallel plans and layers.

    colwise   a rank has some rows of the weight       q, k, v: its heads; gate and up; the output layer's vocabulary
    packed    a rank has some rows of each half        gate and up as one
    rowwise   a rank has some columns of the weight    o and down, followed by an all-reduce

Of more ranks than KV heads, several have the same one: that of their query heads.

transformers keeps sharded weights as DTensors and unwraps them in each call of a layer. Here they are plain tensors
from the start, which its layers accept as well.
Source: `transformers.distributed.tensor_parallel`; Megatron-LM, arXiv 1909.08053.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.distributed.sharding_utils import DtensorShardOperation
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from gridsieve.common.contract.errors import StartupError
from gridsieve.services.generation.parallel.group import Group

# Layers of which a rank has whole KV heads.
_OF_KV_HEADS = ("k_proj", "v_proj")
# transformers' style of a weight whose halves are the gate and up.
PACKED = "packed_colwise"
# The style of layers of which a rank has some rows, but whose outputs are put together. So are recurrent layers'
# inputs, since every rank keeps the whole state.
WHOLE_OUTPUT = "colwise_gather_output"
# torch's grouped matrix products require rows aligned to 16 bytes; this many columns are, in every dtype.
_EXPERT_COLUMNS = 8


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's part of one weight. shape: of the whole weight, or its first axes. cut: what `of` does with it."""

    shape: tuple[int, ...]
    cut: Callable[[Any], Tensor]

    def of(self, whole: Any) -> Tensor:
        """Cuts this rank's part out of a tensor, or out of a slice of safetensors, which then reads only this part.

        Accepts experts whose last two axes are swapped. Raises ValueError for any other shape.
        """
        shape = tuple(whole.shape if isinstance(whole, Tensor) else whole.get_shape())
        if len(shape) == 3 and shape != self.shape == (shape[0], shape[2], shape[1]):
            whole, shape = _Transposed(whole), self.shape
        if shape[: len(self.shape)] != self.shape:
            raise ValueError(f"{list(self.shape)}, got {list(shape)}")
        return self.cut(whole).contiguous()


class _Transposed:
    """A slice of safetensors with its last two axes swapped: published checkpoints store experts this way."""

    def __init__(self, whole: Any) -> None:
        self._whole = whole

    def get_shape(self) -> list[int]:
        first, rows, columns = self._whole.get_shape()
        return [first, columns, rows]

    def __getitem__(self, index: tuple[slice, slice, slice]) -> Tensor:
        first, rows, columns = index
        part: Tensor = self._whole[first, columns, rows]
        return part.transpose(1, 2)


def check_sizes(config: Any, ranks: int, whole_experts: bool = False) -> None:
    """Raises StartupError if a model's heads or its experts' columns cannot be divided evenly among the ranks.

    Other dimensions need not divide evenly: the last rank has less. whole_experts: a rank has some experts whole.
    """
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        raise StartupError(
            f"--tensor-parallel {ranks} must divide the model's {heads} attention heads, and divide its {kv_heads} KV "
            f"heads or be a multiple of them"
        )
    width = 0 if whole_experts else getattr(config, "moe_intermediate_size", 0)
    if width % (ranks * _EXPERT_COLUMNS):  # the first step would fail
        raise StartupError(
            f"--tensor-parallel {ranks} must divide the {width} columns of the model's experts into multiples of "
            f"{_EXPERT_COLUMNS}"
        )


def shard(module: nn.Module, plan: Mapping[str, str], group: Group, kv_heads: int = 0) -> dict[str, Shard]:
    """Turns a module on the meta device into this rank's part of it.

    plan: transformers' style names by full names of modules and parameters. Layers whose outputs are put together get
        the attribute `output_is_whole`. kv_heads: of the model; if there are fewer than ranks, layers of these get the
        attribute `ranks_alike`, the number of ranks that have the same part.
    Returns, by name, this rank's part of each weight that is sharded.
    """
    alike = group.ranks // kv_heads if kv_heads else 1
    of_heads = tuple(name for name in plan if alike > 1 and name.endswith(_OF_KV_HEADS))
    others = {name: style for name, style in plan.items() if not name.startswith(of_heads)}
    apply_tensor_parallelism(module, group.mesh, others)
    for name, layer in module.named_modules():
        if plan.get(name) == WHOLE_OUTPUT:
            layer.output_is_whole = True
        elif plan.get(name) == PACKED and isinstance(layer, nn.Linear):
            layer.packed = True  # type: ignore[assignment]  # for `startup.adapters`
        elif name in of_heads:
            layer.ranks_alike = alike  # likewise
    shards = {}
    for name, parameter in list(module.named_parameters()):
        owner, _, own = name.rpartition(".")
        if isinstance(parameter, DTensor):
            shape, cut = tuple(parameter.to_local().shape), DtensorShardOperation(parameter).shard_tensor
        elif owner in of_heads:
            rows = len(parameter) // kv_heads
            first = group.rank // alike * rows
            shape, cut = (rows, *parameter.shape[1:]), partial(rows_of, range(first, first + rows))
        else:
            continue
        shards[name] = Shard(tuple(parameter.shape), cut)
        module.get_submodule(owner)._parameters[own] = nn.Parameter(
            torch.empty(shape, dtype=parameter.dtype, device="meta"), requires_grad=False
        )
    return shards


def parts_of(text: Any, name: str, plan: Mapping[str, str], group: Group | None) -> tuple[int, int]:
    """Into how many equal parts the ranks divide a layer's rows, each half of a packed one's, and its columns."""
    style = plan.get(name)
    if group is None or style is None:
        return 1, 1
    if style == "rowwise":
        return 1, group.ranks
    if name.endswith(_OF_KV_HEADS):
        return min(group.ranks, text.config.num_key_value_heads), 1
    return group.ranks * (2 if style == PACKED else 1), 1


def rows_of(own: range, whole: Any) -> Tensor:
    """Those numbers of the first axis of a tensor or a slice of safetensors: a `Shard.cut`."""
    part: Tensor = whole[own.start : own.stop]
    return part


def layers_plan(text: Any, plan: Mapping[str, str] | None, ranks: int) -> dict[str, str]:
    """Expands a plan whose names have * for the number of a layer to all layers of a text model.

    Raises StartupError if transformers has no plan for the model.
    """
    if not plan:
        raise StartupError(f"--tensor-parallel {ranks}: transformers has no plan for {type(text).__name__}")
    expanded: dict[str, str] = text._expand_parallel_plan(dict(plan))
    return expanded
