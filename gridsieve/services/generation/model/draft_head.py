"""What drafts: a layer that guesses the tokens after the next from what the model computed of the last.

    row i of a sequence:  embedding of token i + 1, and hidden states of token i       position: that of either token
    output of row i    ─▶ the draft for token i + 2, and in place of hidden states for a row i + 1 that is only drafted

Its rows have the places of the model's in a paged cache of its own: the keys and values of row i are in the slot of
token i. There are EAGLE-3 heads (`eagle3`), and the multi-token prediction of checkpoints (`mtp`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from gridsieve.services.generation.model.attention.cache import Batch


@dataclass(frozen=True, slots=True)
class DraftSizes:
    """What others must know of a head.

    layers: the numbers of the model's layers whose input is read. With n layers, n is the output of the last one, and
        n + 1 the same after the norm. before_levels: the input is read before deepstack was added to it.
    ahead: a row has the position of the next token, whose embedding it reads; else that of its own.
    axes: of the positions that it knows: 3, or 1.
    """

    heads: int
    kv_heads: int
    head_dim: int
    layers: tuple[int, ...]
    before_levels: bool
    ahead: bool
    axes: int

    @property
    def token_values(self) -> int:
        """Numbers in one token's keys and values."""
        return 2 * self.kv_heads * self.head_dim


class Turns(NamedTuple):
    """How each row turns its heads, as the head's layer takes it. cos, sin: [T, frequencies], each twice."""

    cos: Tensor
    sin: Tensor


class DraftHead(nn.Module):
    """embed_tokens: its own embedding, or None for the model's."""

    def __init__(self, sizes: DraftSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embed_tokens: nn.Embedding | None = None
        self._states: dict[int, Tensor] = {}  # by layer, [1, T, D], of the last forward of the model

    def turns(self, positions: Tensor) -> Turns:
        """Of rows at `positions`, int64 [3, T], by `DraftSizes.ahead`."""
        raise NotImplementedError

    def forward(self, embeds: Tensor, hidden: Tensor, turns: Turns, batch: Batch | None = None) -> Tensor:
        """One row for each token. embeds, hidden: [T, D], of the next token and of this one.

        batch: None: that which this thread runs. Returns [T, D], for `draft` and as `hidden` of the row after it.
        """
        raise NotImplementedError

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
        """The hidden states of the model's layers, [.., D] each, as this head reads them: [.., D]."""
        raise NotImplementedError

    def draft(self, rows: Tensor) -> Tensor:
        """The most likely token after each of these outputs, [R, D], in the model's vocabulary: int64 [R]."""
        raise NotImplementedError
