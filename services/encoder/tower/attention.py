"""Attention of towers, as transformers calls it: SDPA once a sequence, or one call a layer of a variable-length kernel.

    rows:  [ a a a ][ b b ] · ·        one call for all sequences; rows behind the last are in none
    ends:  0        3      5  5        read on the device: what is captured in a graph follows them

torch's own flash kernel does the second on CUDA in half precision; what there is, is tried once at the start.
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

# transformers tells of all sequences at once only what has "flash" in its name.
VARLEN = "framesieve_flash_varlen"
# What two kernels may differ by on numbers of about one, in bfloat16.
TOLERANCE = 2e-2
_HEAD_DIM_STEP, _MOST_HEAD_DIM = 8, 256

Wanted: TypeAlias = Literal["auto", "sdpa", "varlen"]

log = structlog.get_logger()


class Attend(Protocol):
    """`torch.nn.attention.varlen.varlen_attn`, as far as it is used: no mask, scaled by head_dim ** -0.5."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, ends_q: Tensor, ends_k: Tensor, max_q: int, max_k: int, /
    ) -> Tensor:
        """All, and what it returns: (P, heads, head_dim); ends: int32 (S + 1,), no sequence longer than max."""


def find_attention(
    wanted: Wanted, device: torch.device, dtype: torch.dtype, heads: int, head_dim: int
) -> Attend | None:
    """The variable-length kernel that suits a tower; None: SDPA does.

    Raises StartupError if it is wanted and cannot be had.
    """
    if device.type == "cuda":
        # torch's first choice on Hopper, and it makes a plan for every new size, for up to half a second: sizes are new
        # with almost every forward here.
        torch.backends.cuda.enable_cudnn_sdp(False)
    attend: Attend | None = None
    obstacle = None if wanted == "sdpa" else unsuitable(device.type, dtype, head_dim)
    if wanted != "sdpa" and obstacle is None:
        attend, obstacle = _try_kernel(device, dtype, heads, head_dim)
    if wanted == "varlen" and obstacle is not None:
        raise StartupError(f"--tower-attention varlen cannot be had: {obstacle}")
    log.info("tower attention", attention="varlen" if attend else "sdpa", device=str(device), reason=obstacle)
    return attend


def unsuitable(device: str, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why the variable-length kernel is none for such a tower, whatever torch has."""
    if device != "cuda":
        return f"it needs a CUDA device, got {device}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in bfloat16 or float16, the tower (--dtype) in {str(dtype).removeprefix('torch.')}"
    if head_dim % _HEAD_DIM_STEP or head_dim > _MOST_HEAD_DIM:
        return f"it takes heads of multiples of {_HEAD_DIM_STEP} up to {_MOST_HEAD_DIM}, the tower's have {head_dim}"
    return None


def _try_kernel(
    device: torch.device, dtype: torch.dtype, heads: int, head_dim: int
) -> tuple[Attend | None, str | None]:
    try:
        attend: Attend = importlib.import_module("torch.nn.attention.varlen").varlen_attn
        check_kernel(attend, device, dtype, heads, head_dim)
    except (ImportError, AttributeError, RuntimeError, ValueError, TypeError, AssertionError) as error:
        return None, f"torch {torch.__version__} has no kernel for it on {device}: {error}"
    return attend, None


def check_kernel(attend: Attend, device: torch.device, dtype: torch.dtype, heads: int, head_dim: int) -> None:
    """Has a kernel attend to sequences of several lengths, with empty ones and NaN behind the last.

    What it is given are views of one product, as a tower's are. NaN is what padding may come to in a pool of memory
    that graphs share: FlashAttention 3 and 4 carried it into embeddings (github.com/vllm-project/vllm/issues/57136), as
    they weigh it by 0, where 2 clears it first (github.com/Dao-AILab/flash-attention/issues/2374).
    Raises what the kernel raises, and AssertionError if it is wrong.
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
    """What transformers calls. Returns (1, P, heads, head_dim)."""
    assert scaling == query.shape[-1] ** -0.5
    query, key, value = (each[0].transpose(0, 1) for each in (query, key, value))
    return attend(query, key, value, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)[None], None


AttentionInterface.register(VARLEN, varlen_attention)
