"""Linear layers of 4 bits: stored so by a checkpoint, or rounded to them while it is read.

A value is 4 bits of an int32, the first one the lowest; N outputs, K inputs, G groups of inputs.

    AWQ        qweight [K, N / 8]           qzeros [G, N / 8]              scales [G, N]
               eight values of an int32 are those of the columns 0 2 4 6 1 3 5 7
    GPTQ       qweight [K / 8, N]           qzeros [G, N / 8]              scales [G, N]           g_idx [K]
               the zeros of its first version are stored less 1; g_idx: the group of each input
    compressed weight_packed [N, K / 8]     weight_zero_point [N / 8, G]   weight_scale [N, G]     weight_g_idx [K]
    -tensors   without zeros they are 8

    weight = (value − zero) · scale

What differs from this is left to `quantised`. Layers are packed one by one, as soon as all their tensors were read.
Source: AutoAWQ's WQLinear_GEMM, AutoGPTQ's QuantLinear, compressed-tensors' pack-quantized.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog
import torch
from torch import Tensor, nn

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.services.compute.int4_linear import Int4Linear, Int4Matrix, Int4Weight, rounded_to_nearest
from gridsieve.services.generation.loading.experts import separate_experts, without_others
from gridsieve.services.generation.loading.quantization_config import compressed_groups, quantization_settings
from gridsieve.services.generation.loading.weights import Named, as_stored, stored_weights
from gridsieve.services.generation.parallel.group import Group
from gridsieve.services.generation.parallel.sharding import Shard

# Of `--quantization int4`.
GROUP = 128
_LEAST_OUTPUTS = 128  # fewer are gates, a number for each head or layer: nothing is saved by rounding them
_AWQ_COLUMNS = (0, 4, 1, 5, 2, 6, 3, 7)  # where an int32 has each of eight columns
# Columns of groups that can be divided among ranks where larger ones cannot.
_SMALLEST = 32

log = structlog.get_logger()

# Names of the modules of a text model in which experts are looked for.
_LAYERS = "layers."


@dataclass(frozen=True, slots=True)
class Int4Format:
    """The tensors of a layer by the last part of their names.

    needed: without which a layer is refused. others: read, too, if a layer has them. read: makes them a matrix. Raises
    ValueError, with the reason, if they cannot be one.
    takes: whether it takes a layer of this size; the others stay as they are.
    """

    needed: tuple[str, ...]
    others: tuple[str, ...]
    read: Callable[[Mapping[str, Tensor]], Int4Matrix]
    takes: Callable[[nn.Linear], bool] = lambda _: True

    @property
    def names(self) -> tuple[str, ...]:
        return self.needed + self.others


def stored_format(checkpoint: Checkpoint) -> Int4Format | None:
    """The format of a checkpoint whose linear layers are stored in 4 bits in a layout above; None of any other."""
    settings = quantization_settings(checkpoint)
    method, bits = settings.get("quant_method"), settings.get("bits")
    kind = str(settings.get("checkpoint_format") or settings.get("format") or settings.get("version") or "").lower()
    if method == "awq" and bits == 4 and kind in ("gemm", ""):
        return Int4Format(("qweight", "qzeros", "scales"), (), _from_awq)
    if method == "gptq" and bits == 4 and kind in ("gptq", "gptq_v2", "") and not settings.get("is_marlin_format"):
        read = partial(_from_gptq, 0 if kind == "gptq_v2" else 1)
        return Int4Format(("qweight", "qzeros", "scales"), ("g_idx",), read)
    if weights := _compressed(settings):
        needed, others = ["weight_packed", "weight_scale"], ["weight_shape", "weight_g_idx"]
        symmetric = {each.get("symmetric", True) for each in weights}
        (needed if symmetric == {False} else others).append("weight_zero_point")
        return Int4Format(tuple(needed), tuple(others), _from_compressed_tensors)
    return None


def int4_format(checkpoint: Checkpoint, in_int4: bool) -> Int4Format | None:
    """The format in which linear layers are to be 4 bits: the stored one, else the nearest values if `in_int4`.

    Raises StartupError if the checkpoint is quantised otherwise.
    """
    stored = stored_format(checkpoint)
    if stored is not None or not in_int4:
        return stored
    if quantization_settings(checkpoint):
        raise StartupError("--quantization int4: the checkpoint is quantised already, in another format")
    return Int4Format(
        ("weight",),
        (),
        lambda tensors: rounded_to_nearest(tensors["weight"], GROUP),
        lambda linear: linear.in_features % GROUP == 0 and linear.out_features >= _LEAST_OUTPUTS,
    )


class Int4Layers:
    """The linear layers of a module that a checkpoint has in a format, of which each becomes an `Int4Linear`."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        module: nn.Module,
        prefix: str,
        how: Int4Format,
        named: Named = as_stored,
        group: Group | None = None,
    ) -> None:
        """module: on the meta device. prefix: of its weights, whose names the module has by `named`.

        Experts in 4 bits become `SeparateExperts`, those of this rank. Raises StartupError, by name, for what else is
        stored in 4 bits and is no linear layer.
        """
        self._checkpoint, self._module, self._prefix, self._how = checkpoint, module, prefix, how
        self._parts: defaultdict[str, set[str]] = defaultdict(set)  # of each layer, the tensors that are read
        if how.needed != ("weight",):
            names = (name for _, name, _ in stored_weights(checkpoint, prefix, named=named))
            separate_experts(module, {name for name in names if name.endswith(f".{how.needed[0]}")}, group)
        self._named = named = without_others(module, named)
        linears = {name: each for name, each in module.named_modules() if type(each) is nn.Linear}
        for full, name, _ in stored_weights(checkpoint, prefix, named=named):
            layer, _, part = name.rpartition(".")
            if layer in linears and how.takes(linears[layer]) and part in how.names:
                self._parts[layer].add(part)
            elif part == how.needed[0] != "weight" and layer.startswith(_LAYERS):
                raise StartupError(f"{full}: only linear layers may be stored in 4 bits")
        for name in self._parts:
            linears[name].__class__ = Int4Linear
        if how.needed == ("weight",) and not self._parts:
            raise StartupError(
                f"--quantization int4: no linear layer has a multiple of {GROUP} inputs and {_LEAST_OUTPUTS} outputs"
            )

    def __len__(self) -> int:
        return len(self._parts)

    def pack(self, dtype: torch.dtype, device: torch.device, shards: Mapping[str, Shard]) -> None:
        """Reads and packs the layers, of those in `shards` this rank's part. dtype: of their rows.

        A layer is packed as soon as all its tensors were read: beside packed layers, one file is in memory.
        Raises StartupError, by name, for missing tensors and for those that cannot be packed.
        """
        if missing := [
            f"{self._prefix}{layer}.{part}"
            for layer, parts in self._parts.items()
            for part in self._how.needed
            if part not in parts
        ]:
            raise StartupError(f"config.json and the quantised weights disagree: missing weights {missing}")
        read: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
        for full, name, file in stored_weights(self._checkpoint, self._prefix, device, self._named):
            layer, _, part = name.rpartition(".")
            if layer not in self._parts:
                continue
            if part == "bias":
                self._check_bias(full, layer, file)
            elif part in self._how.names:
                # Cloned: one view of the file would keep all of it in memory.
                read[layer][part] = file.get_tensor(full).clone()
                if read[layer].keys() == self._parts[layer]:
                    self._pack(layer, read.pop(layer), dtype, shards.get(f"{layer}.weight"))
        packed = [self._layer(name).int4 for name in self._parts]
        layouts = sorted({type(each.layout).__name__ for each in packed})
        log.info("layers in 4 bits", layers=len(packed), bytes=sum(each.size_bytes for each in packed), layouts=layouts)

    def others(self, name: str) -> str | None:
        """The `Named` of the weights that `pack` does not read."""
        found = self._named(name)
        layer, _, part = (found or "").rpartition(".")
        if layer in self._parts and (part in self._how.names or (part == "bias" and self._layer(layer).bias is None)):
            return None
        return found

    def _layer(self, name: str) -> Int4Linear:
        layer = self._module.get_submodule(name)
        assert isinstance(layer, Int4Linear)
        return layer

    def _check_bias(self, full: str, layer: str, file: Any) -> None:
        """AutoGPTQ stores zeros as the bias of layers that have none."""
        if self._layer(layer).bias is None and file.get_tensor(full).any():
            raise StartupError(f"config.json and the quantised weights disagree: unknown weights ['{full}']")

    def _pack(self, name: str, tensors: Mapping[str, Tensor], dtype: torch.dtype, shard: Shard | None) -> None:
        layer = self._layer(name)
        try:
            matrix = self._how.read(tensors)
            shape = shard.shape if shard else tuple(layer.weight.shape)
            if tuple(matrix.values.shape) != shape:
                raise ValueError(f"config.json expects {list(shape)}, got {list(matrix.values.shape)}")
            matrix = matrix.in_groups()
            layer.set_weight(Int4Weight(_part(matrix, shard) if shard else matrix, dtype))
        except (ValueError, RuntimeError) as error:  # of torch: sizes that contradict one another
            raise StartupError(f"{self._prefix}{name} cannot be packed in 4 bits: {error}") from error


def _part(matrix: Int4Matrix, shard: Shard) -> Int4Matrix:
    """A rank's part of a matrix. Raises ValueError if it cuts groups."""
    values = shard.of(matrix.values)
    cuts_columns = values.shape[1] < matrix.values.shape[1]
    if cuts_columns and matrix.order is not None:
        raise ValueError("its inputs are in another order (act-order), and cannot be divided among ranks")
    size = _SMALLEST if cuts_columns and values.shape[1] % matrix.group else matrix.group
    if values.shape[1] % size:
        raise ValueError(f"its {values.shape[1]} inputs of a rank are no multiple of {size}")
    scales, least = (
        shard.of(each.repeat_interleave(matrix.group, 1))[:, ::size].contiguous()
        for each in (matrix.scales, matrix.least)
    )
    return Int4Matrix(values, scales, least, matrix.order)


def _nibbles(packed: Tensor) -> Tensor:
    """The values of 4 bits of int32 [.., n], the lowest first: uint8 [.., 8 · n]."""
    pairs = packed.contiguous().view(torch.uint8)
    return torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2)


def _matrix(values: Tensor, zeros: Tensor | int, scales: Tensor, order: Tensor | None = None) -> Int4Matrix:
    """values: uint8 [N, K]; zeros: uint8 [N, G] or a number; scales: [N, G]."""
    if values.shape[1] % scales.shape[1]:
        raise ValueError(f"{values.shape[1]} inputs are no multiple of {scales.shape[1]} groups")
    scales = scales.float().contiguous()
    if not isinstance(zeros, int):
        zeros = zeros.float()
    return Int4Matrix(values.contiguous(), scales, -zeros * scales, order)


def _order(groups: Tensor | None, count: int) -> Tensor | None:
    """The inputs by group, from the group of each, [K]; None if they are in this order, in `count` groups.

    Raises ValueError if groups differ in size.
    """
    if groups is None:
        return None
    size = len(groups) // count
    order = torch.argsort(groups, stable=True)
    expected = torch.arange(len(groups), device=groups.device) // size
    if not torch.equal(groups[order].long(), expected):
        raise ValueError(f"act-order: its groups are not {count} of {size} inputs each")
    return None if torch.equal(groups.long(), expected) else order


def _from_awq(tensors: Mapping[str, Tensor]) -> Int4Matrix:
    values, zeros = (
        _nibbles(tensors[name]).unflatten(-1, (-1, 8))[..., _AWQ_COLUMNS].flatten(-2).t()
        for name in ("qweight", "qzeros")
    )
    return _matrix(values, zeros, tensors["scales"].t())


def _from_gptq(less: int, tensors: Mapping[str, Tensor]) -> Int4Matrix:
    """less: what is added to stored zeros, in 4 bits: a zero of 0 is stored as 15."""
    zeros = (_nibbles(tensors["qzeros"]) + less) & 15
    order = _order(tensors.get("g_idx"), len(zeros))
    values = _nibbles(tensors["qweight"].t())
    return _matrix(values if order is None else values[:, order], zeros.t(), tensors["scales"].t(), order)


def _from_compressed_tensors(tensors: Mapping[str, Tensor]) -> Int4Matrix:
    scales = tensors["weight_scale"]
    order = _order(tensors.get("weight_g_idx"), scales.shape[1])
    values = _nibbles(tensors["weight_packed"])
    packed = tensors.get("weight_zero_point")
    zeros = 8 if packed is None else _nibbles(packed.t()).t()[: len(values)]
    return _matrix(values if order is None else values[:, order], zeros, scales, order)


def _compressed(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """How weights are stored, of each group of layers; empty if it is not as above, or not only weights are."""
    groups = compressed_groups(settings, "pack-quantized")
    weights = [each["weights"] for each in groups]
    fits = (
        not settings.get("kv_cache_scheme")
        and all(each.get("num_bits") == 4 and each.get("type", "int") == "int" for each in weights)
        and all(each.get("strategy") in ("group", "channel") for each in weights)
        and not any(each.get("input_activations") or each.get("output_activations") for each in groups)
    )
    return weights if fits else []
