"""Which attention a tower uses, by device, dtype, head size and flag; a kernel is tested before it is used."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from common.checkpoint import Checkpoint
from common.contract.errors import StartupError
from services.encoder.families import load_tower
from services.encoder.settings import EncoderSettings
from services.encoder.tower import attention
from services.encoder.tower.attention import Attend, Wanted, check_kernel, find_attention, unsuitable
from tests.encoder.tower_recorder import attend_by_formula

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
HALF, WHOLE = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "complaint"),
    [
        ("cuda", torch.bfloat16, 80, None),  # Qwen2.5-VL
        ("cuda", torch.float16, 72, None),  # Qwen3-VL
        ("cuda", torch.bfloat16, 256, None),
        ("cpu", torch.bfloat16, 80, "needs a CUDA device, got cpu"),
        ("cuda", torch.float32, 80, r"the tower \(--dtype\) in float32"),
        ("cuda", torch.bfloat16, 84, "multiples of 8 up to 256, the tower's have 84"),
        ("cuda", torch.bfloat16, 264, "multiples of 8 up to 256, the tower's have 264"),
    ],
)
@pytest.mark.parametrize("wanted", ["auto", "sdpa", "varlen"])
def test_the_kernel_is_chosen_by_device_dtype_and_head_size_unless_the_flag_says_otherwise(
    wanted: Wanted, device: str, dtype: torch.dtype, head_dim: int, complaint: str | None
) -> None:
    with patch.object(attention, "_try_kernel", return_value=(attend_by_formula, None)):
        if wanted == "varlen" and complaint is not None:
            with pytest.raises(StartupError, match=f"^--tower-attention varlen cannot be used: .*{complaint}"):
                find_attention(wanted, torch.device(device), dtype, 16, head_dim)
            return
        found = find_attention(wanted, torch.device(device), dtype, 16, head_dim)
    assert found is (None if wanted == "sdpa" or complaint is not None else attend_by_formula)
    assert (unsuitable(device, dtype, head_dim) is None) == (complaint is None)


def test_a_torch_without_a_kernel_for_the_device_is_named() -> None:

    def refuse(*_: Tensor | int) -> Tensor:
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer")

    with patch.object(
        attention, "importlib", SimpleNamespace(import_module=lambda _: SimpleNamespace(varlen_attn=refuse))
    ):
        kernel, obstacle = attention._try_kernel(CPU, HALF, 2, 16)
        assert kernel is None
        assert obstacle is not None
        assert obstacle.endswith("FlashAttention only supports Ampere GPUs or newer")
    with patch.object(attention, "_try_kernel", return_value=(None, obstacle)):
        assert find_attention("auto", CUDA, HALF, 2, 16) is None
        with pytest.raises(StartupError, match=r"torch .* has no kernel for it on cpu: FlashAttention only supports"):
            find_attention("varlen", CUDA, HALF, 2, 16)


@pytest.mark.parametrize(
    ("module", "told"),
    [
        (None, "No module named"),
        (SimpleNamespace(), "no attribute 'varlen_attn'"),
        (SimpleNamespace(varlen_attn=lambda query, *_: query), "wrong by"),
        (SimpleNamespace(varlen_attn=lambda query: query), "takes 1 positional argument"),
    ],
)
def test_a_missing_or_wrong_kernel_is_not_used(module: SimpleNamespace | None, told: str) -> None:

    def find(name: str) -> SimpleNamespace:
        if module is None:
            raise ModuleNotFoundError(f"No module named {name!r}")
        return module

    with patch.object(attention, "importlib", SimpleNamespace(import_module=find)):
        kernel, obstacle = attention._try_kernel(CPU, HALF, 2, 16)
    assert kernel is None
    assert obstacle is not None
    assert told in obstacle


def test_a_kernel_that_follows_the_formula_passes() -> None:
    for dtype, head_dim in ((WHOLE, 16), (HALF, 80), (torch.float16, 72)):
        check_kernel(attend_by_formula, CPU, dtype, 3, head_dim)


def _crosses_sequences(*given: Tensor | int) -> Tensor:
    query, key, value, ends, _, most, _ = given
    return attend_by_formula(query, key, value, ends[[0, -1]], ends[[0, -1]], most, most)  # type: ignore[arg-type,index]


def _reads_padding(*given: Tensor | int) -> Tensor:
    query, key, value, ends, _, most, _ = given
    ends = torch.cat([ends[:4], torch.full_like(ends[4:], len(query))])  # type: ignore[arg-type,index]
    return attend_by_formula(query, key, value, ends, ends, most, most)  # type: ignore[arg-type]


def _multiplies_padding_by_0(*given: Tensor | int) -> Tensor:
    _, _, value, ends, *_ = given
    return attend_by_formula(*given) + 0 * value[ends[-1] :].sum()  # type: ignore[arg-type,index,call-arg]


def _scales_wrongly(*given: Tensor | int) -> Tensor:
    query, *rest = given
    return attend_by_formula(query * 0.7, *rest)  # type: ignore[arg-type]


def _assumes_contiguous_rows(*given: Tensor | int) -> Tensor:
    query, key, value, *rest = given
    heads, head_dim = value.shape[1:]  # type: ignore[union-attr]
    value = value.as_strided(value.shape, (heads * head_dim, head_dim, 1))  # type: ignore[union-attr]
    return attend_by_formula(query, key, value, *rest)  # type: ignore[arg-type]


def _assumes_the_bound_is_reached(*given: Tensor | int) -> Tensor:
    query, key, value, ends, _, most, _ = given
    found = attend_by_formula(query, key, value, ends, ends, most, most)  # type: ignore[arg-type]
    return found * (int(ends.diff().max()) / most)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "kernel",
    [
        _crosses_sequences,
        _reads_padding,
        _multiplies_padding_by_0,
        _scales_wrongly,
        _assumes_contiguous_rows,
        _assumes_the_bound_is_reached,
    ],
)
def test_a_wrong_kernel_fails(kernel: Attend) -> None:
    with pytest.raises(AssertionError):
        check_kernel(kernel, CPU, WHOLE, 3, 16)


def test_a_wanted_kernel_that_is_unavailable_is_refused(levels_checkpoint: Path) -> None:
    assert EncoderSettings.load([]).tower_attention == "auto"
    settings = EncoderSettings.load(["--tower-attention", "varlen"])
    with pytest.raises(StartupError, match="--tower-attention varlen cannot be used: it needs a CUDA device, got cpu"):
        load_tower(Checkpoint(levels_checkpoint), "bfloat16", CPU, settings.tower_attention)


def test_cudnn_attention_is_disabled_on_cuda() -> None:
    with patch.object(torch.backends.cuda, "enable_cudnn_sdp") as enable:
        find_attention("sdpa", CPU, HALF, 2, 64)
        enable.assert_not_called()
        find_attention("sdpa", CUDA, HALF, 2, 64)
        enable.assert_called_once_with(False)
