"""Attention of towers, as transformers calls it: once per layer for all sequences.

    rows:  [ a a a ][ b b b ][ c c ] · ·     rows after the last end are in no sequence
    ends:  0        3        6      8  8

On CUDA in half precision one call of torch's variable-length flash kernel, which is tested once at the start. It reads
the ends on the device, so a captured graph follows new ones. Otherwise `attend_by_length` computes neighbours of equal
length together (a, b).
Sources: `torch.nn.attention.varlen`, FlashAttention 2, arXiv 2307.08691; `transformers.AttentionInterface`.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache
from itertools import groupby, pairwise
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import structlog
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from gridsieve.common.contract.errors import StartupError
from gridsieve.services.compute.device import name_of
from gridsieve.services.compute.kernels import avoid_cudnn, check_result
from gridsieve.services.compute.transfers import to_device
from gridsieve.services.encoder.tower.saturation import saturated

# transformers passes the ends of sequences only to attention functions with "flash" in their names.
VARLEN = "gridsieve_flash_varlen"
_HEAD_DIM_STEP, _MAX_HEAD_DIM = 8, 256
# A kernel is tried with these sequences, followed by empty ones and by rows in no sequence, and is told this length.
_LENGTHS, _EMPTY, _PADDING = (3, 64, 1, 150), 4, 20
_BOUND = 2 * max(_LENGTHS)
_CACHED_SCORES = 2**21  # 4 MiB in bfloat16

Wanted: TypeAlias = Literal["auto", "sdpa", "varlen"]

log = structlog.get_logger()


class Attend(Protocol):
    """`torch.nn.attention.varlen.varlen_attn`: without a mask, scaled by head_dim ** -0.5."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, ends_q: Tensor, ends_k: Tensor, max_q: int, max_k: int, /
    ) -> Tensor:
        """query, key, value and result: (P, heads, head_dim). ends: int32 (S + 1,). max: of any sequence's length."""


class Resampling(NamedTuple):
    """Attention of so many queries in each sequence to all its keys."""

    queries: int
    heads: int
    head_dim: int


def find_attention(
    wanted: Wanted,
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    head_dim: int,
    resampling: Resampling | None = None,
) -> Attend:
    """The function that attends to all sequences of a tower: the kernel, or else `attend_by_length`.

    resampling: of towers with a resampler, whose attention it computes as well.
    Raises StartupError if `wanted` is varlen and no kernel works.
    """
    avoid_cudnn(device)
    attend: Attend | None = None
    obstacle = None if wanted == "sdpa" else unsuitable(device.type, dtype, head_dim)
    if wanted != "sdpa" and obstacle is None:
        attend, obstacle = _try_kernel(device, dtype, heads, head_dim, resampling)
    if wanted == "varlen" and obstacle is not None:
        raise StartupError(f"--tower-attention varlen cannot be used: {obstacle}")
    log.info("tower attention", attention="varlen" if attend else "sdpa", device=str(device), reason=obstacle)
    return attend or attend_by_length


def unsuitable(device: str, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why the variable-length kernel does not support such a tower; None if it does."""
    if device != "cuda":
        return f"varlen needs a CUDA device, got {device}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"varlen computes in bfloat16 or float16, the tower (--dtype) in {name_of(dtype)}"
    if head_dim % _HEAD_DIM_STEP or head_dim > _MAX_HEAD_DIM:
        return (
            f"varlen takes head sizes that are multiples of {_HEAD_DIM_STEP} up to {_MAX_HEAD_DIM}, the tower's have "
            f"{head_dim}"
        )
    return None


def _try_kernel(
    device: torch.device, dtype: torch.dtype, heads: int, head_dim: int, resampling: Resampling | None
) -> tuple[Attend | None, str | None]:
    try:
        attend: Attend = importlib.import_module("torch.nn.attention.varlen").varlen_attn
        check_kernel(attend, device, dtype, heads, head_dim)
        if resampling:
            check_resampling(attend, device, dtype, resampling)
    except (ImportError, AttributeError, RuntimeError, ValueError, TypeError, AssertionError) as error:
        return None, f"torch {torch.__version__} has no varlen kernel for {device}: {error}"
    return attend, None


def check_kernel(attend: Attend, device: torch.device, dtype: torch.dtype, heads: int, head_dim: int) -> None:
    """Compares a kernel with SDPA on sequences of several lengths, some empty, with NaN in the rows after the last.

    Its inputs are views of one product, as in a tower. Padding rows may hold NaN, because graphs share a memory pool:
    FlashAttention 3 and 4 carried it into embeddings (github.com/vllm-project/vllm/issues/57136), because they multiply
    it by 0, where 2 clears it first (github.com/Dao-AILab/flash-attention/issues/2374).
    Raises the kernel's errors, and AssertionError if its result is wrong.
    """
    rows = sum(_LENGTHS)
    draw = torch.Generator(device).manual_seed(0)
    drawn = torch.randn(rows + _PADDING, 3, heads, head_dim, generator=draw, device=device).to(dtype)
    drawn[rows:] = torch.nan
    ends = _ends_of(_LENGTHS, device)
    query, key, value = drawn.unbind(1)
    found = attend(query, key, value, ends, ends, _BOUND, _BOUND)
    _compare(found, query, key, value, _LENGTHS)


def check_resampling(attend: Attend, device: torch.device, dtype: torch.dtype, resampling: Resampling) -> None:
    """As `check_kernel`, with keys of several lengths for the same number of queries, each a tensor of its own."""
    queries, *shape = resampling
    asking, keys = queries * len(_LENGTHS), sum(_LENGTHS)
    draw = torch.Generator(device).manual_seed(0)
    query, key, value = (
        torch.randn(rows + _PADDING, *shape, generator=draw, device=device).to(dtype) for rows in (asking, keys, keys)
    )
    key[keys:] = value[keys:] = torch.nan
    lengths = [queries] * len(_LENGTHS)
    ends_q, ends_k = _ends_of(lengths, device), _ends_of(_LENGTHS, device)
    found = attend(query, key, value, ends_q, ends_k, queries, _BOUND)
    _compare(found, query, key, value, lengths)


def _ends_of(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Ends of sequences of these lengths and of some empty ones."""
    return torch.tensor([0, *lengths, *[0] * _EMPTY], device=device).cumsum(0, dtype=torch.int32)


def _compare(found: Tensor, query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int]) -> None:
    """lengths: of queries; those of keys are _LENGTHS."""
    expected = [
        F.scaled_dot_product_attention(*(each.float().transpose(0, 1) for each in sequence)).transpose(0, 1)
        for sequence in zip(
            query[: sum(lengths)].split(list(lengths)),
            *(each[: sum(_LENGTHS)].split(list(_LENGTHS)) for each in (key, value)),
            strict=True,
        )
    ]
    check_result(found[: sum(lengths)], torch.cat(expected))


def attend_by_length(
    query: Tensor, key: Tensor, value: Tensor, ends_q: Tensor, ends_k: Tensor, max_q: int, max_k: int
) -> Tensor:
    """Implements `Attend`: a call for each run of sequences of equal length.

    query, key, value: on any device. ends: on the host, where they are read without waiting for the device.
    Slices of one size have the same windows, and are computed together. Queries with other ends than the keys are
    computed a sequence at a time.

        lengths:  4 4 2 2 1   4 4 2 2 1        three calls, of 2 × 2, 2 × 2 and 2 × 1 sequences

    Slices of which tokens were chosen have other windows each. Then the sequences are first sorted by length.
    """
    if ends_q is not ends_k:
        return _attend_across(query, key, value, ends_q, ends_k)
    attended: Tensor = torch.ops.gridsieve.attend_by_length(query, key, value, ends_q)
    return attended


def _attend_across(query: Tensor, key: Tensor, value: Tensor, ends_q: Tensor, ends_k: Tensor) -> Tensor:
    """Each sequence of queries attends to the keys of its own."""
    out = torch.empty_like(query)
    asking, known = (list(pairwise(ends.tolist())) for ends in (ends_q, ends_k))
    for (first, last), (begin, end) in zip(asking, known, strict=True):
        if first < last:
            asked, keys, values = (
                each.transpose(0, 1) for each in (query[first:last], key[begin:end], value[begin:end])
            )
            out[first:last] = F.scaled_dot_product_attention(asked, keys, values).transpose(0, 1)
    return out


def _attend_by_length(query: Tensor, key: Tensor, value: Tensor, ends: Tensor) -> Tensor:
    lengths, rows = ends.diff().tolist(), int(ends[-1])
    counts = (n for n in range(1, len(lengths) + 1) if not len(lengths) % n)
    period = next(n for n in counts if lengths == lengths[:n] * (len(lengths) // n))
    repeats = len(lengths) // period
    if repeats == 1 and len(list(groupby(lengths))) > len(set(lengths)):
        sizes = ends.diff()
        order = to_device(sizes.repeat_interleave(sizes).argsort(stable=True), query.device)
        by_length = F.pad(sizes.sort().values.cumsum(0), (1, 0))
        attended = _attend_by_length(query[order], key[order], value[order], by_length)
        return torch.empty_like(query).index_copy_(0, order, attended)
    on_cpu = query.device.type == "cpu"
    attend = _softmax_of_products if on_cpu and _multiplies_fast(query.dtype) else F.scaled_dot_product_attention
    out = torch.empty_like(query)
    end = 0
    for length, run in groupby(lengths[:period]):
        count = sum(1 for _ in run)
        begin, end = end, end + count * length
        # (repeats, count, heads, length, head_dim)
        *own, target = (
            each[:rows].unflatten(0, (repeats, -1))[:, begin:end].unflatten(1, (count, length)).transpose(2, 3)
            for each in (query, key, value, out)
        )
        target.copy_(attend(*(each.flatten(0, 1) for each in own)).view(target.shape))
    return out


# An operator of its own is opaque to the compiler: which calls it makes depends on the ends.
_library = torch.library.Library("gridsieve", "FRAGMENT")
_library.define("attend_by_length(Tensor query, Tensor key, Tensor value, Tensor ends) -> Tensor")
_library.impl("attend_by_length", _attend_by_length, "CPU")
_library.impl("attend_by_length", _attend_by_length, "CUDA")  # that of the rows: the ends are on the host
_library.impl("attend_by_length", lambda query, key, value, ends: torch.empty_like(query), "Meta")


def _softmax_of_products(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """As SDPA, (S, heads, length, head_dim) each. Scores are rounded to the dtype, as in transformers' eager attention.

    SDPA's kernel multiplies at a third of the rate of oneDNN's in bfloat16. Products are computed in parts whose scores
    stay in the processor's cache.
    """
    shape, (length, head_dim) = query.shape, query.shape[2:]
    rows = max(1, min(length, _CACHED_SCORES // length))
    at_once = max(1, _CACHED_SCORES // (rows * length))
    query, key, value = (each.flatten(0, 1) for each in (query, key, value))
    out = torch.empty(query.shape, dtype=query.dtype)
    for first in range(0, len(query), at_once):
        own = slice(first, first + at_once)
        keys, values = key[own].transpose(1, 2), value[own]
        for row in range(0, length, rows):
            asking = query[own, row : row + rows]
            scores = torch.baddbmm(asking.new_empty(()), asking, keys, beta=0, alpha=head_dim**-0.5)
            out[own, row : row + rows] = torch.bmm(scores.softmax(-1), values)
    return out.view(shape)


@cache
def _multiplies_fast(dtype: torch.dtype) -> bool:
    """Whether the processor multiplies numbers of a dtype faster than float32."""
    return dtype == torch.bfloat16 and bool(torch.cpu._is_avx512_bf16_supported())


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
    """The attention function registered with transformers. Returns (1, P, heads, head_dim).

    Rotary embeddings rotate pairs of values, of which one may become as large as the length of the pair. So queries and
    keys may exceed float16, though the products that they were made of are clamped.
    """
    assert scaling == query.shape[-1] ** -0.5
    query, key, value = (each[0].transpose(0, 1) for each in (saturated(query), saturated(key), value))
    return attend(query, key, value, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)[None], None


AttentionInterface.register(VARLEN, varlen_attention)
