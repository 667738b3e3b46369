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

from framesieve.services.generation.model.attention.cache import Batch
from framesieve.services.generation.model.draft_head import DraftHead, DraftSizes


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
    """Under the names of its checkpoint."""

    d2t: Tensor

    def __init__(self, sizes: Eagle3Sizes) -> None:
        super().__init__(sizes)
        self.fc = nn.Linear(len(sizes.layers) * sizes.hidden, sizes.hidden, bias=False)
        self.midlayer = DraftLayer(sizes)
        self.norm = nn.RMSNorm(sizes.hidden, sizes.eps)
        self.lm_head: nn.Module = nn.Linear(sizes.hidden, sizes.vocab, bias=False)
        self.register_buffer("d2t", torch.zeros(sizes.vocab, dtype=torch.int64))

    def forward(self, embeds: Tensor, hidden: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        """See `DraftHead`."""
        rows: Tensor = self.midlayer(embeds, hidden, positions, batch)
        return rows

    def joined(self, states: Sequence[Tensor]) -> Tensor:
        """See `DraftHead`."""
        rows: Tensor = self.fc(torch.cat(list(states), dim=-1))
        return rows

    def draft(self, rows: Tensor) -> Tensor:
        """See `DraftHead`."""
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

    def forward(self, embeds: Tensor, hidden: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        both = torch.cat([self.input_layernorm(embeds), self.hidden_norm(hidden)], dim=-1)
        hidden = hidden + self.self_attn(both, positions, batch)
        rows: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return rows


class DraftAttention(nn.Module):
    def __init__(self, sizes: Eagle3Sizes) -> None:
        super().__init__()
        self._head_dim, self._rotary = sizes.head_dim, sizes.rotary
        wide, narrow = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        self.q_proj = nn.Linear(2 * sizes.hidden, wide, bias=False)
        self.k_proj = nn.Linear(2 * sizes.hidden, narrow, bias=False)
        self.v_proj = nn.Linear(2 * sizes.hidden, narrow, bias=False)
        self.o_proj = nn.Linear(wide, sizes.hidden, bias=False)

    def prepare(self, device: torch.device) -> None:
        """Computes what the checkpoint does not have."""
        frequencies = torch.arange(0, self._head_dim, 2, dtype=torch.float32, device=device) / self._head_dim
        self.inverse = self._rotary.theta**-frequencies
        self.axes = self._rotary.axes(len(frequencies)).to(device)

    def forward(self, rows: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        """rows: [T, 2 · D]. Returns [T, D]."""
        query, key, value = (
            project(rows).unflatten(-1, (-1, self._head_dim)).transpose(0, 1)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        angles = positions[self.axes].T * self.inverse  # [T, head_dim / 2]
        cos, sin = (each.to(rows.dtype) for each in (angles.cos(), angles.sin()))
        query, key = (_rotated(each, cos, sin) for each in (query, key))
        attended = batch.attend(0, query, key, value, self._head_dim**-0.5)
        output: Tensor = self.o_proj(attended.flatten(1))
        return output


class DraftMlp(nn.Module):
    def __init__(self, sizes: Eagle3Sizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.hidden, sizes.intermediate, bias=False)
        self.up_proj = nn.Linear(sizes.hidden, sizes.intermediate, bias=False)
        self.down_proj = nn.Linear(sizes.intermediate, sizes.hidden, bias=False)
        self.activation = ACT2FN[sizes.activation]

    def forward(self, rows: Tensor) -> Tensor:
        output: Tensor = self.down_proj(self.activation(self.gate_proj(rows)) * self.up_proj(rows))
        return output


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """heads: [heads, T, head_dim], whose halves are rotated against each other. cos, sin: [T, head_dim / 2]."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
