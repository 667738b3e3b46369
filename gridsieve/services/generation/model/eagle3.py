"""An EAGLE-3 head: one decoder layer that guesses the tokens after the next from what the model computed of the last.

    row i of a sequence:  [ embedding of token i + 1 | hidden states of token i ]     position: that of either token
                              normalised                 three layers', joined by `fc`, normalised
    output of row i    ─▶ the draft for token i + 2, and in place of hidden states for a row i + 1 that is only drafted

Its own vocabulary is a part of the model's: token t of it is token t + d2t[t].

Sources: EAGLE-3, arXiv 2503.01840; checkpoints of SpecForge (`LlamaForCausalLMEagle3`) and AngelSlim
(`Eagle3LlamaForCausalLM`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from gridsieve.services.generation.model.attention import paged_attention
from gridsieve.services.generation.model.attention.cache import Batch
from gridsieve.services.generation.model.draft_head import DraftHead, DraftSizes, Turns


@dataclass(frozen=True, slots=True)
class Rotary:
    """How a head turns positions into rotations.

    sections: frequencies of each of the three axes of a position; empty of a head that knows one axis: of a model with
        three, it counts the tokens of the sequence. interleaved: the axes take turns, as in Qwen3-VL, until the last
        two have their number.
    """

    theta: float
    sections: tuple[int, ...] = ()
    interleaved: bool = False

    def axes(self, frequencies: int) -> Tensor:
        """The axis that each frequency rotates by: int64 [frequencies]."""
        axes = torch.zeros(frequencies, dtype=torch.int64)
        if not self.sections:
            return axes
        if not self.interleaved:
            return torch.repeat_interleave(torch.arange(len(self.sections)), torch.tensor(self.sections))
        for axis in (1, 2):
            axes[axis : 3 * self.sections[axis] : 3] = axis
        return axes


@dataclass(frozen=True, slots=True)
class Eagle3Sizes(DraftSizes):
    hidden: int
    intermediate: int
    vocab: int
    eps: float
    activation: str
    rotary: Rotary


class Eagle3Head(DraftHead):
    """Weights have the names of the checkpoint, except those of joined products."""

    sizes: Eagle3Sizes
    d2t: Tensor

    def __init__(self, sizes: Eagle3Sizes) -> None:
        super().__init__(sizes)
        self.fc = nn.Linear(len(sizes.layers) * sizes.hidden, sizes.hidden, bias=False)
        self.midlayer = DraftLayer(sizes)
        self.norm = nn.RMSNorm(sizes.hidden, sizes.eps)
        self.lm_head: nn.Module = nn.Linear(sizes.hidden, sizes.vocab, bias=False)
        self.register_buffer("d2t", torch.zeros(sizes.vocab, dtype=torch.int64))

    def prepare(self, device: torch.device) -> None:
        """Computes what the checkpoint does not have."""
        half = self.sizes.head_dim // 2
        inverse = self.sizes.rotary.theta ** -(torch.arange(half, dtype=torch.float32, device=device) / half)
        self._inverse = torch.cat([-inverse, inverse])
        self._axes = self.sizes.rotary.axes(half).repeat(2).to(device)

    def turns(self, positions: Tensor) -> Turns:
        """The sines of the first half of a head are negative."""
        angles = positions[self._axes].T.contiguous() * self._inverse
        return Turns(*(each.to(self.norm.weight.dtype) for each in (angles.cos(), angles.sin())))

    def forward(self, embeds: Tensor, hidden: Tensor, turns: Turns, batch: Batch | None = None) -> Tensor:
        rows: Tensor = self.midlayer(embeds, hidden, turns, batch)
        return rows

    def joined(self, states: Sequence[Tensor]) -> Tensor:
        rows: Tensor = self.fc(torch.cat(list(states), dim=-1))
        return rows

    def draft(self, rows: Tensor) -> Tensor:
        best: Tensor = self.lm_head(self.norm(rows)).argmax(dim=-1)
        return best + self.d2t[best]


class DraftLayer(nn.Module):
    def __init__(self, sizes: Eagle3Sizes) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(sizes.hidden, sizes.eps)
        self.hidden_norm = nn.RMSNorm(sizes.hidden, sizes.eps)
        self.self_attn = DraftAttention(sizes)
        self.post_attention_layernorm = nn.RMSNorm(sizes.hidden, sizes.eps)
        self.mlp = DraftMlp(sizes)

    def forward(self, embeds: Tensor, hidden: Tensor, turns: Turns, batch: Batch | None) -> Tensor:
        both = torch.cat([self.input_layernorm(embeds), self.hidden_norm(hidden)], dim=-1)
        hidden = hidden + self.self_attn(both, turns, batch)
        rows: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return rows


class DraftAttention(nn.Module):
    """qkv_proj: the checkpoint's q_proj, k_proj and v_proj as one product."""

    layer_idx = 0

    def __init__(self, sizes: Eagle3Sizes) -> None:
        super().__init__()
        self._sizes = sizes
        self.qkv_proj = nn.Linear(2 * sizes.hidden, sizes.heads * sizes.head_dim + sizes.token_values, bias=False)
        self.o_proj = nn.Linear(sizes.heads * sizes.head_dim, sizes.hidden, bias=False)

    def forward(self, rows: Tensor, turns: Turns, batch: Batch | None) -> Tensor:
        """rows: [T, 2 · D]. Returns [T, D]."""
        heads, kv_heads, head_dim = self._sizes.heads, self._sizes.kv_heads, self._sizes.head_dim
        product = self.qkv_proj(rows).unflatten(-1, (-1, head_dim)).transpose(0, 1)
        query, key = _turned(product[: heads + kv_heads], turns).split([heads, kv_heads])
        value = product[heads + kv_heads :]
        attended, _ = paged_attention(
            self, query[None], key[None], value[None], None, scaling=head_dim**-0.5, batch=batch
        )
        output: Tensor = self.o_proj(attended[0].flatten(1))
        return output


class DraftMlp(nn.Module):
    """gate_up_proj: the checkpoint's gate_proj and up_proj as one product."""

    def __init__(self, sizes: Eagle3Sizes) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(sizes.hidden, 2 * sizes.intermediate, bias=False)
        self.down_proj = nn.Linear(sizes.intermediate, sizes.hidden, bias=False)
        self.activation = ACT2FN[sizes.activation]

    def forward(self, rows: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(rows).chunk(2, dim=-1)
        output: Tensor = self.down_proj(self.activation(gate) * up)
        return output


def _turned(heads: Tensor, turns: Turns) -> Tensor:
    """heads: [heads, T, head_dim], whose halves are turned against each other."""
    return torch.addcmul(heads * turns.cos, heads.roll(heads.shape[-1] // 2, -1), turns.sin)
