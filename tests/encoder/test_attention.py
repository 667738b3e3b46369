"""Which attention a tower uses, by device, dtype, head size and flag; a kernel is tested before it is used."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.services.encoder.tower import attention, vision_model
from gridsieve.services.encoder.tower.attention import (
    Attend,
    Resampling,
    Wanted,
    check_kernel,
    check_resampling,
    find_attention,
)
from gridsieve.services.encoder.tower.loading import load_tower
from tests.encoder.tower_recorder import attend_by_formula
from tests.families import minicpm

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "complaint"),
    [
        ("cuda", torch.bfloat16, 80, None),  # Qwen2.5-VL
        ("cuda", torch.float16, 72, None),  # Qwen3-VL
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
        if wanted == "varlen" and complaint:
            with pytest.raises(StartupError, match=f"^--tower-attention varlen cannot be used: .*{complaint}"):
                find_attention(wanted, torch.device(device), dtype, 16, head_dim)
        else:
            found = find_attention(wanted, torch.device(device), dtype, 16, head_dim)
            assert found is (attention.attend_by_length if wanted == "sdpa" or complaint else attend_by_formula)


def _refuses(*_: Any) -> Tensor:
    raise RuntimeError("FlashAttention only supports Ampere GPUs or newer")


@pytest.mark.parametrize(
    ("module", "complaint"),
    [
        (ModuleNotFoundError("No module named varlen"), "No module named"),
        (SimpleNamespace(varlen_attn=_refuses), "only supports Ampere"),
        (SimpleNamespace(varlen_attn=lambda query, *_: query), "the result differs by"),
    ],
)
def test_a_missing_or_wrong_kernel_is_not_used(module: Any, complaint: str) -> None:
    with patch("importlib.import_module", side_effect=[module]):
        kernel, obstacle = attention._try_kernel(CPU, torch.bfloat16, 2, 16, None)
    assert kernel is None
    assert complaint in str(obstacle)


def _crosses_sequences(query: Any, key: Any, value: Any, ends: Any, _: Any, most: int, __: int) -> Any:
    return attend_by_formula(query, key, value, both := ends[[0, -1]], both, most, most)


def _multiplies_padding_by_0(query: Any, key: Any, value: Any, ends: Any, _: Any, most: int, __: int) -> Any:
    return attend_by_formula(query, key, value, ends, ends, most, most) + 0 * value[ends[-1] :].sum()


def _assumes_contiguous_rows(query: Any, key: Any, value: Any, ends: Any, _: Any, most: int, __: int) -> Any:
    heads, head_dim = value.shape[1:]
    value = value.as_strided(value.shape, (heads * head_dim, head_dim, 1))
    return attend_by_formula(query, key, value, ends, ends, most, most)


def _assumes_the_bound_is_reached(query: Any, key: Any, value: Any, ends: Any, _: Any, most: int, __: int) -> Any:
    return attend_by_formula(query, key, value, ends, ends, most, most) * (int(ends.diff().max()) / most)


@pytest.mark.parametrize(
    "kernel",
    [_crosses_sequences, _multiplies_padding_by_0, _assumes_contiguous_rows, _assumes_the_bound_is_reached],
)
def test_a_wrong_kernel_fails(kernel: Attend) -> None:
    with pytest.raises(AssertionError):
        check_kernel(kernel, CPU, torch.float32, 3, 16)


def _takes_the_queries_for_the_keys(query: Any, key: Any, value: Any, ends: Any, _: Any, *most: int) -> Any:
    return attend_by_formula(query, key, value, ends, ends, *most)


def _reads_as_many_keys_as_queries(query: Any, key: Any, value: Any, ends: Any, ends_k: Any, *most: int) -> Any:
    if ends is ends_k:
        return attend_by_formula(query, key, value, ends, ends_k, *most)
    kept = [torch.arange(first, min(last, first + most[0])) for first, last in pairwise(ends_k.tolist())]
    cut = torch.tensor([0, *map(len, kept)]).cumsum(0, dtype=torch.int32)
    return attend_by_formula(query, key[torch.cat(kept)], value[torch.cat(kept)], ends, cut, *most)


@pytest.mark.parametrize("kernel", [_takes_the_queries_for_the_keys, _reads_as_many_keys_as_queries])
def test_a_kernel_that_is_wrong_in_a_resampler_only_is_used_in_towers_without_one(kernel: Attend) -> None:
    resampling = Resampling(64, 2, 128)
    tried = partial(attention._try_kernel, CPU, torch.float32, 2, 16)
    with patch("importlib.import_module", return_value=SimpleNamespace(varlen_attn=kernel)):
        assert tried(None) == (kernel, None)
        assert "the result differs by" in str(tried(resampling)[1])
    check_resampling(attend_by_formula, CPU, torch.float32, resampling)


def test_a_resamplers_kernel_is_tried_with_its_own_queries_and_heads(tmp_path: Path) -> None:
    minicpm.write(tmp_path, 1)
    with patch.object(vision_model, "find_attention", return_value=attention.attend_by_length) as found:
        load_tower(Checkpoint(tmp_path), "float32", CPU)
    assert found.call_args.args[-1] == Resampling(minicpm.QUERIES["2.6"], minicpm.WIDTH // 128, 128)
