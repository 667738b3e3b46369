"""Gated delta networks over the slots of recurrent states.

transformers' functions compute the rule: on a card with the package fla they are its kernels, which are tried at the
start, else torch's operators.
Source: arXiv 2412.06464; `Qwen3_5GatedDeltaNet` of transformers, whose weights and names the layer keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule

from gridsieve.services.compute.kernels import check_result
from gridsieve.services.generation.model.recurrent_layer import (
    Kernels,
    RecurrentLayer,
    TriedKernels,
)
from gridsieve.services.generation.model.slot_steps import SlotKernels, SlotSteps
from gridsieve.services.generation.model.states import FEW_TOKENS, StateBatch, StateSizes

_INSTALLED = Kernels(torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule)
_BY_TORCH = _INSTALLED.by_torch()


@dataclass(frozen=True, slots=True)
class GatedDeltaRule(TriedKernels):
    """A `Recurrence`. Channels are queries, keys and values; gates are beta and decay, the latter in log space.

    key_heads, value_heads: each key head serves value_heads / key_heads value heads. key_dim, value_dim: of one head.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernels: Kernels = field(default=_BY_TORCH, kw_only=True)
    package = "fla"
    installed = _INSTALLED

    @property
    def matrices(self) -> tuple[int, int, int]:
        return self.value_heads, self.key_dim, self.value_dim

    def advance(
        self, convolved: Tensor, gates: Sequence[Tensor], weights: Sequence[Tensor], matrices: Tensor
    ) -> tuple[Tensor, Tensor]:
        beta, decay = gates
        return (self.kernels.step if convolved.shape[1] <= FEW_TOKENS else self.kernels.chunk)(
            *self._heads(convolved),
            g=decay,
            beta=beta,
            initial_state=matrices,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )

    @property
    def output(self) -> tuple[int, int]:
        return self.value_heads, self.value_dim

    def step_slots(self, kernels: SlotKernels, steps: SlotSteps) -> None:
        kernels.delta(steps, self.key_heads)

    def sample(self, tokens: int, drawn: Callable[..., Tensor]) -> tuple[Tensor, list[Tensor], tuple[Tensor, ...]]:
        channels = 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
        beta, decay = (drawn(2, tokens, self.value_heads) for _ in range(2))
        return drawn(2, tokens, channels), [beta.sigmoid(), -decay.abs()], ()

    def _heads(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of [B, L, channels]: [B, L, heads, head_dim] each."""
        keys = self.key_heads * self.key_dim
        query, key, value = convolved.split([keys, keys, self.value_heads * self.value_dim], dim=-1)
        return (
            query.unflatten(-1, (self.key_heads, self.key_dim)),
            key.unflatten(-1, (self.key_heads, self.key_dim)),
            value.unflatten(-1, (self.value_heads, self.value_dim)),
        )

    def check(self, exact: GatedDeltaRule, like: Tensor, drawn: Callable[..., Tensor]) -> None:
        chunk, step = (self.kernels.chunk, exact.kernels.chunk), (self.kernels.step, exact.kernels.step)
        for tokens, installed, by_torch in ((70, *chunk), (1, *step), (FEW_TOKENS, *step)):
            keys, values = (2, tokens, self.key_heads, self.key_dim), (2, tokens, self.value_heads, self.value_dim)
            rows = drawn(*keys), drawn(*keys), drawn(*values)
            state = drawn(2, *self.matrices)
            more = {
                "g": -drawn(*values[:3]).abs(),
                "beta": drawn(*values[:3]).sigmoid(),
                "output_final_state": True,
                "use_qk_l2norm_in_kernel": True,
            }
            found = installed(*(each.to(like.dtype) for each in rows), initial_state=state.clone(), **more)
            expected = by_torch(*rows, initial_state=state.clone(), **more)
            for one, other in zip(found, expected, strict=True):
                check_result(one, other)


class GatedDeltaNet(RecurrentLayer):
    """The class that such a layer of transformers takes on."""

    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    conv_dim: int
    conv_kernel_size: int
    in_proj_qkv: nn.Module
    in_proj_z: nn.Module
    in_proj_b: nn.Module
    in_proj_a: nn.Module
    norm: nn.Module
    out_proj: nn.Module
    A_log: nn.Parameter
    dt_bias: nn.Parameter

    def sizes(self, layers: int) -> StateSizes:
        rule = GatedDeltaRule(self.num_k_heads, self.num_v_heads, self.head_k_dim, self.head_v_dim)
        return StateSizes(layers, self.conv_dim, self.conv_kernel_size, rule)

    def forward(self, hidden_states: Tensor, states: StateBatch | None = None, **_: object) -> Tensor:
        """hidden_states: [1, T, D], the packed rows. Returns the same shape."""
        inputs, z = self.in_proj_qkv(hidden_states), self.in_proj_z(hidden_states)
        beta = self.in_proj_b(hidden_states).sigmoid()
        decay = -self.A_log.float().exp() * F.softplus(self.in_proj_a(hidden_states).float() + self.dt_bias)
        out = self.advance(states, inputs, (beta, decay), (), self.head_v_dim)
        normed = self.norm(out.flatten(0, 2), z.reshape(-1, self.head_v_dim))
        rows: Tensor = self.out_proj(normed.view(z.shape))
        return rows
