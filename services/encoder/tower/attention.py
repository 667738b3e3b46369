"""Attention of towers, as transformers calls it: SDPA per sequence, or one variable-length kernel call per layer.

    rows:  [ a a a ][ b b ] · ·        one call for all sequences; rows behind the last end are in none
    ends:  0        3      5  5        read on the device, so a captured graph follows new ends

torch's flash kernel provides the latter on CUDA in half precision; it is tested once at the start.
Sources: `torch.nn.attention.varlen`, FlashAttention 2, arXiv 2307.08691; `transformers.AttentionInterface`.
"""

from __future__ import annotations

import importlib
from typing import Any, Literal, Protocol, TypeAlias

import structlog
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from common.contract.errors import StartupError

# transformers passes the ends of sequences only to attention functions with "flash" in their names.
VARLEN = "framesieve_flash_varlen"
# The largest difference between two kernels on values of about one, in bfloat16.
TOLERANCE = 2e-2
_HEAD_DIM_STEP, _MOST_HEAD_DIM = 8, 256

Wanted: TypeAlias = Literal["auto", "sdpa", "varlen"]

log = structlog.get_logger()


class Attend(Protocol):
    """`torch.nn.attention.varlen.varlen_attn`: without a mask, scaled by head_dim ** -0.5."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, ends_q: Tensor, ends_k: Tensor, max_q: int, max_k: int, /
    ) -> Tensor:
        """query, key, value and result: (P, heads, head_dim). ends: int32 (S + 1,). max: of any sequence's length."""


def find_attention(
    wanted: Wanted, device: torch.device, dtype: torch.dtype, heads: int, head_dim: int
) -> Attend | None:
    """The variable-length kernel for a tower, or None for SDPA.

    Raises StartupError if `wanted` is varlen and no kernel works.
    """
    if device.type == "cuda":
        # cuDNN is torch's first choice on Hopper, but plans for up to half a second for every new size, and almost
        # every forward here has a new size.
        torch.backends.cuda.enable_cudnn_sdp(False)
    attend: Attend | None = None
    obstacle = None if wanted == "sdpa" else unsuitable(device.type, dtype, head_dim)
    if wanted != "sdpa" and obstacle is None:
        attend, obstacle = _try_kernel(device, dtype, heads, head_dim)
    if wanted == "varlen" and obstacle is not None:
        raise StartupError(f"--tower-attention varlen cannot be used: {obstacle}")
    log.info("tower attention", attention="varlen" if attend else "sdpa", device=str(device), reason=obstacle)
    return attend


def unsuitable(device: str, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why the variable-length kernel does not support such a tower; None if it does."""
    if device != "cuda":
        return f"varlen needs a CUDA device, got {device}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"varlen computes in bfloat16 or float16, the tower (--dtype) in {str(dtype).removeprefix('torch.')}"
    if head_dim % _HEAD_DIM_STEP or head_dim > _MOST_HEAD_DIM:
        most = f"{_HEAD_DIM_STEP} up to {_MOST_HEAD_DIM}"
        return f"varlen takes head sizes that are multiples of {most}, the tower's have {head_dim}"
    return None


def _try_kernel(
    device: torch.device, dtype: torch.dtype, heads: int, head_dim: int
) -> tuple[Attend | None, str | None]:
    try:
        attend: Attend = importlib.import_module("torch.nn.attention.varlen").varlen_attn
        check_kernel(attend, device, dtype, heads, head_dim)
    except (ImportError, AttributeError, RuntimeError, ValueError, TypeError, AssertionError) as error:
        return None, f"torch {torch.__version__} has no varlen kernel for {device}: {error}"
    return attend, None


def check_kernel(attend: Attend, device: torch.device, dtype: torch.dtype, heads: int, head_dim: int) -> None:
    """Runs a kernel on sequences of several lengths, some empty, with NaN rows behind the last, and compares with SDPA.

    Its inputs are views of one product, as in a tower. Padding rows may hold NaN, because graphs share a memory pool:
    FlashAttention 3 and 4 carried it into embeddings (github.com/vllm-project/vllm/issues/57136), because they multiply
    it by 0, where 2 clears it first (github.com/Dao-AILab/flash-attention/issues/2374).
    Raises the kernel's errors, and AssertionError if its result is wrong.
    """
    lengths, empty, behind = [3, 64, 1, 150], 4, 20
    rows, bound = sum(lengths), 2 * max(lengths)
    draw = torch.Generator(device).manual_seed(0)
    drawn = torch.randn(rows + behind, 3, heads, head_dim, generator=draw, device=device).to(dtype)
    drawn[rows:] = torch.nan
    ends = torch.tensor([0, *lengths, *[0] * empty], device=device).cumsum(0, dtype=torch.int32)
    query, key, value = drawn.unbind(1)
    found = attend(query, key, value, ends, ends, bound, bound)[:rows]
    expected = torch.cat(
        [
            F.scaled_dot_product_attention(*each.float().permute(1, 2, 0, 3)).transpose(0, 1)
            for each in drawn[:rows].split(lengths)
        ]
    )
    difference = float((found.float() - expected).abs().max())
    assert difference < TOLERANCE, f"wrong by {difference}"


def varlen_attention(
    module: nn.Module,
    query: Tensor,  # (1, heads, P, head_dim)
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    attend: Attend,
    scaling: float,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention function registered with transformers. Returns (1, P, heads, head_dim)."""
    assert scaling == query.shape[-1] ** -0.5
    query, key, value = (each[0].transpose(0, 1) for each in (query, key, value))
    return attend(query, key, value, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)[None], None


AttentionInterface.register(VARLEN, varlen_attention)
