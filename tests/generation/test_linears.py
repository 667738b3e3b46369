"""Linear layers packed for the CPU compute what torch's own compute."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from services.generation.families.text_model import PackedLinear, pack_linears, packed


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 65, 300])
def test_a_packed_layer_computes_what_the_layer_computes(dtype: torch.dtype, rows: int) -> None:
    torch.manual_seed(rows)
    for bias in (False, True):
        linear = nn.Linear(96, 40, bias=bias, dtype=dtype).requires_grad_(False)
        layer = packed(linear)
        if dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported():
            assert isinstance(layer, PackedLinear)
        states = torch.randn(1, rows, 96).to(dtype)
        expected = linear.float()(states.float())
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(layer(states).float(), expected, atol=tolerance, rtol=tolerance)


class Other(torch.Tensor):
    pass


def other_forward(linear: nn.Linear) -> None:
    linear.forward = lambda states: states  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "change",
    [
        other_forward,
        lambda linear: linear.to(torch.float64),
        lambda linear: linear.__delattr__("weight"),
        lambda linear: setattr(linear, "weight", nn.Parameter(linear.weight.detach().as_subclass(Other))),
    ],
)
def test_quantised_and_unsupported_layers_are_not_packed(change: Callable[[nn.Linear], None]) -> None:
    linear = nn.Linear(8, 8).requires_grad_(False)
    change(linear)
    model = nn.Sequential(linear)
    pack_linears(model)
    assert model[0] is linear


def test_nested_linear_layers_are_packed_and_other_layers_kept() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 4))).requires_grad_(False)
    states = torch.randn(1, 3, 8)
    expected = model(states)
    pack_linears(model)
    kinds = [type(each) for each in model.modules() if not isinstance(each, nn.Sequential)]
    assert kinds == [PackedLinear, nn.LayerNorm, PackedLinear]
    torch.testing.assert_close(model(states), expected, atol=1e-5, rtol=1e-5)
