"""Linear layers packed for the CPU compute what torch's own compute."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from services.generation.families.text_model import PackedLinear, pack_linears


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("rows", [1, 300])
def test_packed_layers_compute_what_the_layers_compute(dtype: torch.dtype, tolerance: float, rows: int) -> None:
    model = nn.Sequential(nn.Linear(96, 40, bias=False), nn.Sequential(nn.LayerNorm(40), nn.Linear(40, 8)))
    model = model.to(dtype).requires_grad_(False)
    states = torch.randn(1, rows, 96, generator=torch.Generator().manual_seed(rows)).to(dtype)
    expected = copy.deepcopy(model).float()(states.float())
    pack_linears(model)
    if dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        kinds = [type(each) for each in model.modules() if not isinstance(each, nn.Sequential)]
        assert kinds == [PackedLinear, nn.LayerNorm, PackedLinear]
    torch.testing.assert_close(model(states).float(), expected, atol=tolerance, rtol=tolerance)


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
