"""Rotary embeddings and gated activations by FlashInfer on CUDA: one kernel each, for ten and two of torch's.

    rotary embedding   transformers' class computes cosines and sines, whichever axes of a position they are of; here
                       they become a table with a row for each token, once a forward
    attention          transformers' own code over other globals: its function that rotates reads the table
    MLP, experts       the joined product of gate and up is multiplied as it is. Sharded and quantised layers have two
                       products, which are multiplied by transformers' code, as are those of other activations

Source: flashinfer-python 0.7.2, include/flashinfer/pos_enc.cuh and activation.cuh: bfloat16 and float16, heads whose
halves are rotated against each other; they compute in float32 and round once.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import structlog
import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.integrations.moe import _default_apply_gate

from gridsieve.services.compute.kernels import check_result
from gridsieve.services.compute.packed_linear import as_one
from gridsieve.services.generation.model.attention.flash_infer import may_work
from gridsieve.services.generation.model.layers import attention_layers

# The name under which transformers' attention finds it, in every family.
ROTATION = "apply_rotary_pos_emb"
# FlashInfer's functions by `hidden_act` of a config.
ACTIVATIONS = {"silu": "silu_and_mul", "gelu": "gelu_and_mul", "gelu_pytorch_tanh": "gelu_tanh_and_mul"}

log = structlog.get_logger()


class RotaryTable(nn.Module):
    """Takes the place of a rotary embedding of transformers, `rotary`."""

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, rows: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """The table, float32 [T, head_dim], of the cosines and sines of half a head; and each token's row, int32 [T].

        position_ids: as transformers' class takes them. rows: of any shape, on the device.
        """
        cos, sin = self.rotary(rows.new_empty(0, dtype=torch.float32), position_ids)
        return self.of(cos[0], sin[0])

    @staticmethod
    def of(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """As `forward`, of cosines and sines, float32 [T, head_dim], with equal halves."""
        table = torch.cat([each.chunk(2, dim=-1)[0] for each in (cos, sin)], dim=-1)
        return table, torch.arange(len(table), dtype=torch.int32, device=table.device)


class FusedMlp(nn.Module):
    """The class that an MLP of transformers takes on. multiply: [.., 2 · I] to [.., I]."""

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module
    act_fn: nn.Module
    multiply: Callable[[Tensor], Tensor]

    def forward(self, rows: Tensor) -> Tensor:
        """[.., D] to the same shape."""
        gate, up = self.gate_proj(rows), self.up_proj(rows)
        both = as_one(gate, up)
        found: Tensor = self.down_proj(self.act_fn(gate) * up if both is None else self.multiply(both))
        return found


def fuse_layers(text: Any) -> None:
    """Makes a text model on CUDA use FlashInfer's kernels, if it is installed and they pass a trial."""
    if hasattr(text, "rotary_emb") and may_work(attention_layers(text)[0].head_dim, text.norm.weight):
        try:
            _fuse(importlib.import_module("flashinfer"), text)
        except Exception as error:  # it compiles kernels for the card, which may fail in any way
            log.warning("rotary embeddings and activations are torch's: FlashInfer does not work", error=str(error))


def _fuse(library: Any, text: Any) -> None:
    """Makes a text model use the kernels of `library`, the module `flashinfer`.

    Raises the library's exceptions, and AssertionError for wrong results, before anything is changed.
    """
    rotate = partial(_rotate, library)
    kernel = ACTIVATIONS.get(text.config.hidden_act)
    multiply = None if kernel is None else partial(_multiply, getattr(library, kernel))
    attention = _over(rotate, type(attention_layers(text)[0]))
    _check(rotate, multiply, text)
    text.rotary_emb = RotaryTable(text.rotary_emb)
    for layer in attention_layers(text):
        layer.__class__ = attention
    if multiply is None:
        return
    for module in text.modules():
        if all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")):
            module.__class__, module.multiply = FusedMlp, multiply
        elif getattr(type(module), "_apply_gate", None) is _default_apply_gate:  # experts
            module._apply_gate = multiply


def _rotate(library: Any, query: Tensor, key: Tensor, table: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """query: [1, heads, T, head_dim]; key: [1, kv_heads, T, head_dim]. table, places: as `RotaryTable` gives them."""
    head_dim = query.shape[-1]
    flat = [each[0].transpose(0, 1).flatten(1) for each in (query, key)]  # [T, heads · head_dim]
    found = library.apply_rope_with_cos_sin_cache(places, *flat, head_dim, table)
    query, key = (each.unflatten(1, (-1, head_dim)).transpose(0, 1)[None] for each in found)
    return query, key


def _multiply(kernel: Callable[[Tensor], Tensor], both: Tensor) -> Tensor:
    return kernel(both.contiguous())  # which it takes for granted


def _over(rotate: Callable[..., tuple[Tensor, Tensor]], attention: type) -> type:
    """An attention class of transformers whose code calls `rotate`."""
    forward = inspect.unwrap(vars(attention)["forward"])
    assert ROTATION in forward.__code__.co_names
    copy = FunctionType(forward.__code__, {**forward.__globals__, ROTATION: rotate}, argdefs=forward.__defaults__)
    return type(attention.__name__, (attention,), {"forward": copy})


@torch.inference_mode()
def _check(
    rotate: Callable[..., tuple[Tensor, Tensor]], multiply: Callable[[Tensor], Tensor] | None, text: Any
) -> None:
    """Compares the kernels with transformers' functions in float32, on views of one product as joined layers give."""
    attention, like, device = attention_layers(text)[0], text.norm.weight, text.norm.weight.device
    draw = torch.Generator(device).manual_seed(0)
    product = torch.rand((1, 5, 3, attention.head_dim), generator=draw, device=device).mul(2).sub(1).to(like.dtype)
    query, key = product.transpose(1, 2).split((2, 1), dim=1)
    positions = 1000 * torch.arange(5, device=device)[None]
    found = rotate(query, key, *RotaryTable(text.rotary_emb)(like, positions))
    theirs = inspect.unwrap(type(attention).forward).__globals__[ROTATION]
    expected = theirs(query.float(), key.float(), *text.rotary_emb(product.float(), positions))
    for rows, exact in zip(found, expected, strict=True):
        check_result(rows, exact)
    if multiply is None:
        return
    gate, up = product.flatten(2).float().chunk(2, dim=-1)
    check_result(multiply(product.flatten(2)), ACT2FN[text.config.hidden_act](gate) * up)
