"""Mamba2 over the slots of recurrent states.

transformers' functions compute the scan: on a card with the package mamba-ssm they are its kernels, which are tried at
the start, else torch's operators. Time steps are clamped from below in chunks and in decode steps alike; transformers
clamps them in chunks alone, so its answers depend on where a chunk ends.
Source: arXiv 2405.21060; `NemotronHMamba2Mixer` of transformers, whose weights and names the layer keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan, mamba2_selective_state_update

from gridsieve.services.compute.kernels import check_result
from gridsieve.services.generation.model.recurrent_layer import (
    Kernels,
    RecurrentLayer,
    TriedKernels,
)
from gridsieve.services.generation.model.slot_steps import SlotKernels, SlotSteps
from gridsieve.services.generation.model.states import FEW_TOKENS, StateBatch, StateSizes

_INSTALLED = Kernels(mamba2_chunk_scan, mamba2_selective_state_update)
_BY_TORCH = _INSTALLED.by_torch()


@dataclass(frozen=True, slots=True)
class SelectiveScan(TriedKernels):
    """A `Recurrence`. Channels are x, B and C; the gate is the time step; weights are A and D, float32 [heads].

    heads, head_dim: of x. groups: of B and C, each of which serves heads / groups heads. state_dim: of one head.
    chunk_tokens: of a chunk of the scan.
    """

    heads: int
    head_dim: int
    groups: int
    state_dim: int
    chunk_tokens: int
    kernels: Kernels = field(default=_BY_TORCH, kw_only=True)
    package = "mamba-ssm"
    installed = _INSTALLED

    @property
    def matrices(self) -> tuple[int, int, int]:
        return self.heads, self.head_dim, self.state_dim

    def advance(
        self, convolved: Tensor, gates: Sequence[Tensor], weights: Sequence[Tensor], matrices: Tensor
    ) -> tuple[Tensor, Tensor]:
        (time_steps,), (rates, skip) = gates, weights
        if convolved.shape[1] <= FEW_TOKENS:
            return self._steps(convolved, time_steps, rates, skip, matrices)
        x, b, c = self._parts(convolved)
        return self.kernels.chunk(
            x,
            time_steps,
            rates,
            b,
            c,
            chunk_size=self.chunk_tokens,
            D=skip,
            initial_states=matrices,
            return_final_states=True,
        )

    @property
    def output(self) -> tuple[int, int]:
        return self.heads, self.head_dim

    def step_slots(self, kernels: SlotKernels, steps: SlotSteps) -> None:
        kernels.scan(steps, self.groups)

    def sample(self, tokens: int, drawn: Callable[..., Tensor]) -> tuple[Tensor, list[Tensor], tuple[Tensor, ...]]:
        convolved = drawn(2, tokens, self.heads * self.head_dim + 2 * self.groups * self.state_dim)
        return convolved, [drawn(2, tokens, self.heads).abs()], (-drawn(self.heads).abs(), drawn(self.heads))

    def _steps(
        self, convolved: Tensor, time_steps: Tensor, rates: Tensor, skip: Tensor, matrices: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One token after the other, in float32, as in a chunk. Changes the matrices."""
        outs = []
        x, b, c = self._parts(convolved.float())
        no_bias = torch.zeros_like(skip)[:, None].expand(x.shape[2:])  # mamba-ssm's kernel reads its stride
        for token in range(convolved.shape[1]):
            out = self.kernels.step(
                matrices,
                x[:, token],
                time_steps[:, token, :, None].expand(x[:, token].shape),
                rates[:, None, None].expand(self.matrices),
                b[:, token],
                c[:, token],
                skip[:, None].expand(x.shape[2:]),
                dt_bias=no_bias,
            )
            outs.append(out)
        return torch.stack(outs, dim=1), matrices

    def _parts(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [.., heads, head_dim], B and C [.., groups, state_dim] of [.., channels]."""
        shared = self.groups * self.state_dim
        x, b, c = convolved.split([self.heads * self.head_dim, shared, shared], dim=-1)
        return (
            x.unflatten(-1, (self.heads, self.head_dim)),
            b.unflatten(-1, (self.groups, self.state_dim)),
            c.unflatten(-1, (self.groups, self.state_dim)),
        )

    def check(self, exact: SelectiveScan, like: Tensor, drawn: Callable[..., Tensor]) -> None:
        tokens = self.chunk_tokens + 6
        convolved, (time_steps,), weights = self.sample(tokens, drawn)
        convolved, matrices = convolved.to(like.dtype), drawn(2, *self.matrices)
        both = ((self, convolved), (exact, convolved.float()))
        for end in (tokens, 1):
            found, expected = (
                each.advance(rows[:, :end], [time_steps[:, :end]], weights, matrices.clone()) for each, rows in both
            )
            for one, other in zip(found, expected, strict=True):
                largest = other.abs().max()
                check_result(one / largest, other / largest)


class Mamba2(RecurrentLayer):
    """The class that such a layer of transformers takes on."""

    num_heads: int
    head_dim: int
    n_groups: int
    ssm_state_size: int
    intermediate_size: int
    conv_dim: int
    conv_kernel_size: int
    chunk_size: int
    time_step_limit: tuple[float, float]
    in_proj: nn.Module
    norm: nn.Module
    out_proj: nn.Module
    A_log: nn.Parameter
    D: nn.Parameter
    dt_bias: nn.Parameter

    def sizes(self, layers: int) -> StateSizes:
        scan = SelectiveScan(self.num_heads, self.head_dim, self.n_groups, self.ssm_state_size, self.chunk_size)
        return StateSizes(layers, self.conv_dim, self.conv_kernel_size, scan)

    def forward(self, hidden_states: Tensor, states: StateBatch | None = None, **_: object) -> Tensor:
        """hidden_states: [1, T, D], the packed rows. Returns the same shape."""
        sizes = [self.intermediate_size, self.conv_dim, self.num_heads]
        gate, inputs, time_step = self.in_proj(hidden_states).split(sizes, dim=-1)
        time_step = F.softplus(time_step.float() + self.dt_bias.float()).clamp(*self.time_step_limit)
        weights = (-self.A_log.float().exp(), self.D.float())
        out = self.advance(states, inputs, (time_step,), weights, self.head_dim)
        rows: Tensor = self.out_proj(self.norm(out.flatten(2), gate))
        return rows
