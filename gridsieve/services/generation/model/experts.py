"""Experts of a mixture without a wait for the device, where torch's grouped product reads its offsets on the host.

It does so on CUDA except with bfloat16 on compute capability 9 and 10: the host waits at both products of each layer,
and no graph can hold them. What is used there depends on the number of rows T; k of E experts compute a row.

    3 · T · k ≤ E    the weights of each row's experts are gathered: read, written and read again
    T ≤ 256          all experts compute all rows: more arithmetic, but each weight is read once
    more             torch's grouped product; the host waits

So steps that decode and short chunks of prompts do not wait, and graphs of up to 256 rows can be captured.

Where answers must have the same bits whatever is computed together, no product's size may depend on the choice of
experts: on CUDA all experts compute all rows, elsewhere each computes its own rows, EXPERT_ROWS at a time.

Source: `transformers.integrations.moe`, whose functions the first and the last are; torch's condition:
aten/src/ATen/native/cuda/GroupedBlas.cpp, `_grouped_mm_cuda`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.integrations.moe import (
    ALL_EXPERTS_FUNCTIONS,
    batched_mm_experts_forward,
    grouped_mm_experts_forward,
)

from gridsieve.services.generation.model.fixed_sizes import in_fixed_sizes

EXPERTS, FIXED_EXPERTS = "gridsieve_experts", "gridsieve_fixed_experts"
# All experts compute at most so many rows. An estimate: about here the arithmetic of 128 experts, of 768 columns each,
# takes an A100 as long as the launches of one product for each expert.
MAX_ROWS = 256
# How often a gathered weight is moved, for once otherwise.
_GATHERED = 3
# Of one product in a fixed order of sums. In a forward most experts have fewer rows: more would be zeros.
EXPERT_ROWS = 16


def waits(weight: Tensor) -> bool:
    """Whether torch's grouped product with such weights makes the host wait."""
    if weight.device.type != "cuda":
        return False
    return weight.dtype != torch.bfloat16 or torch.cuda.get_device_capability(weight.device)[0] not in (9, 10)


def rows_without_wait(text: Any, rows: int) -> int:
    """Of so many rows, those that a text model computes without a wait: all, or as many as all experts compute."""
    return min(rows, MAX_ROWS) if text.config._experts_implementation == EXPERTS else rows


def compute_experts(module: Any, rows: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """The function registered with transformers, for experts without biases.

    rows: [T, D]. experts: int64 [T, k], the experts of each row; weights: [T, k], theirs. Returns [T, D].
    """
    count, chosen = experts.shape
    if _GATHERED * count * chosen <= module.num_experts:
        computed: Tensor = batched_mm_experts_forward(module, rows, experts, weights)
    elif count <= MAX_ROWS:
        computed = _by_all_experts(module, rows, experts, weights)
    else:
        computed = grouped_mm_experts_forward(module, rows, experts, weights)
    return computed


def _by_all_experts(module: Any, rows: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    weight: nn.Parameter = module.gate_up_proj if module.has_gate else module.up_proj  # [E, 2 · I or I, D]
    product = F.linear(rows, weight.flatten(0, 1)).unflatten(1, weight.shape[:2])  # [T, E, 2 · I or I]
    inner: Tensor = module._apply_gate(product) if module.has_gate else module.act_fn(product)  # [T, E, I]
    del product  # the largest of them
    outputs = torch.bmm(inner.transpose(0, 1), module.down_proj.mT)  # [E, T, D]
    own = outputs[experts, torch.arange(len(rows), device=rows.device)[:, None]]  # [T, k, D]
    return (own * weights[..., None]).sum(1).to(rows.dtype)


def compute_fixed(module: Any, rows: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """As `compute_experts`. A row's result has the same bits whichever experts other rows have.

    rows: always as many.
    """
    if rows.device.type == "cuda":
        return _by_all_experts(module, rows, experts, weights)
    own = {number: partial(_compute_expert, module, number) for number in range(module.num_experts)}
    return by_expert(own, rows, experts, weights, module.num_experts, fixed=True)


def _compute_expert(module: Any, number: int, rows: Tensor) -> Tensor:
    """[n, D] to the same shape."""
    product = F.linear(rows, (module.gate_up_proj if module.has_gate else module.up_proj)[number])
    inner = module._apply_gate(product) if module.has_gate else module.act_fn(product)
    return F.linear(inner, module.down_proj[number])


def by_expert(
    own: Mapping[int, Callable[[Tensor], Tensor]],
    rows: Tensor,
    experts: Tensor,
    weights: Tensor,
    count: int,
    fixed: bool = False,
) -> Tensor:
    """As `compute_experts`, an expert after the other. The host waits for the choice.

    own: experts by their numbers, which are adjacent and increasing; others, of other ranks, add zeros. count: of all
    experts. fixed: an expert gets EXPERT_ROWS rows at a time, and zeros where it has fewer.
    """
    order = experts.flatten().argsort(stable=True)
    counts = torch.bincount(experts.flatten(), minlength=count).tolist()
    first = next(iter(own), 0)
    before, counts = sum(counts[:first]), counts[first : first + len(own)]
    order = order[before : before + sum(counts)]
    parts = rows[order // experts.shape[1]].split(counts)
    computed = torch.cat(
        [
            rows[:0],
            *(
                in_fixed_sizes(expert, part, (EXPERT_ROWS,)) if fixed else expert(part)
                for expert, part in zip(own.values(), parts, strict=True)
                if len(part)
            ),
        ]
    )
    outputs = computed.new_zeros(experts.numel(), rows.shape[1]).index_copy_(0, order, computed)
    outputs = outputs.view(*experts.shape, -1)
    return (outputs * weights[..., None]).sum(1).to(rows.dtype)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, compute_experts)
ALL_EXPERTS_FUNCTIONS.register(FIXED_EXPERTS, compute_fixed)
