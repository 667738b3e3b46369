"""Checkpoints whose linear layers are stored in 4 bits, in published layouts, beside their dequantised twins."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from demo.checkpoint import TINY
from tests.families import FAMILIES, load_reference
from tests.generation.checkpoints import Twins, changed, load
from tests.tiny import Models

# Sizes that torch's layouts take.
SHAPE = replace(
    TINY, hidden=256, heads=8, kv_heads=4, intermediate=384, mrope_section=(4, 6, 6), layers=2, init_range=0.05
)
PREFIX = FAMILIES["qwen2_5_vl"].text_prefix


@dataclass(frozen=True)
class Stored:
    """A layout: its quantization_config, whether zeros are stored, columns in a group, and whether in act-order."""

    config: dict[str, Any]
    zeros: bool = True
    group: int = 128
    act_order: bool = False


def _compressed(**weights: Any) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "strategy": "group"} | weights
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*visual.*"],
    }


_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
LAYOUTS = {
    "awq": Stored(_AWQ),
    "gptq": Stored(_GPTQ, zeros=False),
    "gptq in act-order": Stored(_GPTQ | {"sym": False, "desc_act": True}, group=32, act_order=True),
    "gptq_v2": Stored(_GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"}),
    "compressed-tensors": Stored(_compressed(symmetric=True, group_size=128), zeros=False),
    "compressed-tensors with zeros": Stored(_compressed(symmetric=False, group_size=32), group=32),
    "compressed-tensors in act-order": Stored(
        _compressed(symmetric=True, group_size=128, actorder="group"), zeros=False, act_order=True
    ),
}


def int4_twins(kind: str, written: Path, folder: Path, family: str = "qwen2_5_vl") -> Twins:
    """Of a checkpoint of a family, in one of `LAYOUTS`."""
    stored, weights = LAYOUTS[kind], load_file(written / "model.safetensors")
    draw = torch.Generator().manual_seed(3)
    plain, quantised = dict(weights), dict(weights)
    for name, weight in weights.items():
        if name.startswith(FAMILIES[family].text_prefix) and name.endswith("_proj.weight"):
            tensors, plain[name] = in_int4(weight, stored, draw)
            del quantised[name]
            quantised |= {name.removesuffix("weight") + part: each for part, each in tensors.items()}
    assert len(quantised) > len(plain)

    def become(to: dict[str, Tensor]) -> Any:
        return lambda held: (held.clear(), held.update(to))

    changed(written, folder / "plain", become(plain))
    changed(written, folder / "quantised", become(quantised), quantization_config=stored.config)
    engine, reference = load(folder / "plain"), load_reference(family, folder / "plain")
    models = Models(folder / "plain", replace(FAMILIES[family], hidden=engine.hidden_size), engine, reference)
    return Twins(folder / "quantised", folder / "plain", models, quantised)


def in_int4(weight: Tensor, stored: Stored, draw: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors to store by the last part of their names, and the dequantised weight."""
    rows, columns = weight.shape
    of_column = torch.arange(columns) // stored.group
    if stored.act_order:
        of_column = of_column[torch.randperm(columns, generator=draw)]
    values = torch.empty(rows, columns, dtype=torch.int64)
    scales = torch.empty(rows, columns // stored.group, dtype=torch.float16)
    zeros = torch.full(scales.shape, 8)
    for group in range(columns // stored.group):
        own = weight[:, of_column == group].float()
        if stored.zeros:
            least, most = own.amin(1).clamp(max=0), own.amax(1).clamp(min=0)
            scales[:, group] = ((most - least) / 15).half()
            zeros[:, group] = (-least / scales[:, group].float()).round().long()
        else:
            scales[:, group] = (own.abs().amax(1) / 7).half()
        near = (own / scales[:, group, None].float()).round().long() + zeros[:, group, None]
        values[:, of_column == group] = near.clamp(0, 15)
    dense = (values - zeros[:, of_column]) * scales[:, of_column].float()
    method = stored.config["quant_method"]
    if method == "awq":
        order = torch.tensor([8 * each + column for each in range(rows // 8) for column in (0, 2, 4, 6, 1, 3, 5, 7)])
        tensors = {"qweight": _int32(values.T[:, order]), "qzeros": _int32(zeros.T[:, order]), "scales": scales.T}
    elif method == "gptq":
        less = 0 if stored.config.get("checkpoint_format") == "gptq_v2" else 1
        tensors = {
            "qweight": _int32(values).T,
            "qzeros": _int32((zeros.T - less) % 16),
            "scales": scales.T,
            "g_idx": of_column.int(),
        }
    else:
        tensors = {
            "weight_packed": _int32(values),
            "weight_scale": scales,
            "weight_shape": torch.tensor([rows, columns]),
        }
        if stored.zeros:
            tensors["weight_zero_point"] = _int32(zeros.T).T
        if stored.act_order:
            tensors["weight_g_idx"] = of_column.int()
    return {name: each.contiguous() for name, each in tensors.items()}, dense


def packed_for_cuda(values: Tensor) -> Tensor:
    """Values of 4 bits [N, K] as torch's products on CUDA read them.

    Thread t of 32 has of a tile of 8 × 16 the row t / 4 and the columns 2 · (t % 4) + 0, 1, 8 and 9; an int32 has those
    of two tiles, of which the second of each pair comes 16 bits later.
    """
    rows, columns = values.shape
    packed = torch.zeros(rows // 8, columns // 128, 32, 4, dtype=torch.int64)
    for column in range(columns):
        block, within = divmod(column, 128)
        pair, of_pair = divmod(within // 16, 2)
        half, place = divmod(column % 16, 8)
        bits = 4 * (2 * of_pair + half) + 16 * (place % 2)
        for row in range(8):
            packed[:, block, 4 * row + place // 2, pair] |= values[row::8, column].long() << bits
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()


def _int32(values: Tensor) -> Tensor:
    """Eight values of 4 bits in each, the first one the lowest."""
    whole = sum(values[:, place::8] << 4 * place for place in range(8))
    assert isinstance(whole, Tensor)
    return torch.where(whole >= 2**31, whole - 2**32, whole).int()
