"""An EAGLE-3 head: one decoder layer that guesses the tokens after the next from what the model computed of the last.

    row i of a sequence:  [ embedding of token i + 1 | hidden states of token i ]     position: that of either token
                              normalised                 three layers', joined by `fc`, normalised
    output of row i    ─▶ the draft for token i + 2, and in place of hidden states for a row i + 1 that is only drafted

Its rows have the places of the model's in a paged cache of its own: the keys and values of row i are in the slot of
token i. Its own vocabulary is a part of the model's: token t of it is token t + d2t[t].

Sources: EAGLE-3, arXiv 2503.01840; checkpoints of SpecForge (`LlamaForCausalLMEagle3`) and AngelSlim
(`Eagle3LlamaForCausalLM`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from framesieve.services.generation.model.attention import paged_attention
from framesieve.services.generation.model.attention.cache import Batch


@dataclass(frozen=True, slots=True)
class Rotary:
    """How a head turns positions into rotations.

    sections: frequencies of each of the three axes of a position; empty of a head that knows one axis: of a model with
        three, it counts the tokens of the sequence. interleaved: the axes take turns, as in Qwen3-VL, until the last
        two have their number.
    ahead: a row has the position of the next token, whose embedding it reads; else that of its own.
    """

    theta: float
    sections: tuple[int, ...] = ()
    interleaved: bool = False
    ahead: bool = True

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
class DraftSizes:
    """Of a head. layers: of the model, whose input is read; as many as there are stand for its last output.

    before_levels: their input is read before deepstack was added to it.
    """

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    eps: float
    activation: str
    rotary: Rotary
    layers: tuple[int, ...]
    before_levels: bool

    @property
    def token_values(self) -> int:
        """Numbers in one token's keys and values."""
        return 2 * self.kv_heads * self.head_dim


class Turns(NamedTuple):
    """How each row turns a head's first half against its second. cos, sin: [T, head_dim]; sin of the first half is
    negative."""

    cos: Tensor
    sin: Tensor

    def of(self, heads: Tensor) -> Tensor:
        """heads: [heads, T, head_dim]."""
        return torch.addcmul(heads * self.cos, heads.roll(heads.shape[-1] // 2, -1), self.sin)


class DraftHead(nn.Module):
    """Under the names of its checkpoint, but for joined products. embed_tokens: its own, or None for the model's."""

    d2t: Tensor

    def __init__(self, sizes: DraftSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.fc = nn.Linear(len(sizes.layers) * sizes.hidden, sizes.hidden, bias=False)
        self.midlayer = DraftLayer(sizes)
        self.norm = nn.RMSNorm(sizes.hidden, sizes.eps)
        self.lm_head: nn.Module = nn.Linear(sizes.hidden, sizes.vocab, bias=False)
        self.register_buffer("d2t", torch.zeros(sizes.vocab, dtype=torch.int64))
        self.embed_tokens: nn.Embedding | None = None
        self._states: dict[int, Tensor] = {}  # by layer, [1, T, D], of the last forward of the model

    def prepare(self, device: torch.device) -> None:
        """Computes what the checkpoint does not have."""
        half = self.sizes.head_dim // 2
        inverse = self.sizes.rotary.theta ** -(torch.arange(half, dtype=torch.float32, device=device) / half)
        self._inverse = torch.cat([-inverse, inverse])
        self._axes = self.sizes.rotary.axes(half).repeat(2).to(device)

    def turns(self, positions: Tensor) -> Turns:
        """How the heads of rows turn. positions: int64 [3, T], by `Rotary.ahead`."""
        angles = positions[self._axes].T.contiguous() * self._inverse
        return Turns(*(each.to(self.norm.weight.dtype) for each in (angles.cos(), angles.sin())))

    def forward(self, embeds: Tensor, hidden: Tensor, turns: Turns, batch: Batch | None = None) -> Tensor:
        """One row for each token. embeds, hidden: [T, D], of the next token and of this one.

        batch: None: that which this thread runs. Returns [T, D], for `draft` and as `hidden` of the row after it.
        """
        rows: Tensor = self.midlayer(embeds, hidden, turns, batch)
        return rows

    def read(self, text: Any) -> None:
        """Reads from now on what each forward of a text model computes."""
        places = [*text.layers, text.norm]
        for layer in self.sizes.layers:
            if layer and self.sizes.before_levels:  # without deepstack, the output of the layer before
                places[layer - 1].register_forward_hook(partial(self._read_output, layer))
            else:
                places[layer].register_forward_pre_hook(partial(self._read_input, layer))

    def _read_input(self, layer: int, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._states[layer] = inputs[0]

    def _read_output(self, layer: int, _: nn.Module, __: Any, output: Any) -> None:
        self._states[layer] = output[0] if isinstance(output, tuple) else output

    def hidden(self) -> Tensor:
        """What it read of the last forward of the model, once: [T, D]."""
        joined = self.joined([self._states[layer][0] for layer in self.sizes.layers])
        self._states.clear()
        return joined

    def joined(self, states: Sequence[Tensor]) -> Tensor:
        """The hidden states of the model's layers, [.., D] each, as one for each row: [.., D]."""
        rows: Tensor = self.fc(torch.cat(list(states), dim=-1))
        return rows

    def draft(self, rows: Tensor) -> Tensor:
        """The most likely token after each of these outputs, [R, D], in the model's vocabulary: int64 [R]."""
        best: Tensor = self.lm_head(self.norm(rows)).argmax(dim=-1)
        return best + self.d2t[best]


class DraftLayer(nn.Module):
    def __init__(self, sizes: DraftSizes) -> None:
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

    def __init__(self, sizes: DraftSizes) -> None:
        super().__init__()
        self._sizes = sizes
        self.qkv_proj = nn.Linear(2 * sizes.hidden, sizes.heads * sizes.head_dim + sizes.token_values, bias=False)
        self.o_proj = nn.Linear(sizes.heads * sizes.head_dim, sizes.hidden, bias=False)

    def forward(self, rows: Tensor, turns: Turns, batch: Batch | None) -> Tensor:
        """rows: [T, 2 · D]. Returns [T, D]."""
        heads, kv_heads, head_dim = self._sizes.heads, self._sizes.kv_heads, self._sizes.head_dim
        product = self.qkv_proj(rows).unflatten(-1, (-1, head_dim)).transpose(0, 1)
        query, key = turns.of(product[: heads + kv_heads]).split([heads, kv_heads])
        value = product[heads + kv_heads :]
        attended, _ = paged_attention(
            self, query[None], key[None], value[None], None, scaling=head_dim**-0.5, batch=batch
        )
        output: Tensor = self.o_proj(attended[0].flatten(1))
        return output


class DraftMlp(nn.Module):
    """gate_up_proj: the checkpoint's gate_proj and up_proj as one product."""

    def __init__(self, sizes: DraftSizes) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(sizes.hidden, 2 * sizes.intermediate, bias=False)
        self.down_proj = nn.Linear(sizes.intermediate, sizes.hidden, bias=False)
        self.activation = ACT2FN[sizes.activation]

    def forward(self, rows: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(rows).chunk(2, dim=-1)
        output: Tensor = self.down_proj(self.activation(gate) * up)
        return output
