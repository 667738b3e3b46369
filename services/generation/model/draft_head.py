"""What drafts: a layer that guesses the tokens after the next from what the model computed of the last.

    row i of a sequence:  embedding of token i + 1, and hidden states of token i       position: that of either token
    output of row i    ─▶ the draft for token i + 2, and in place of hidden states for a row i + 1 that is only drafted

Its rows have the places of the model's in a paged cache of its own: the keys and values of row i are in the slot of
token i. There are EAGLE-3 heads (`eagle3`), and the multi-token prediction of checkpoints (`mtp`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from framesieve.services.generation.model.attention.cache import Batch


@dataclass(frozen=True, slots=True)
class DraftSizes:
    """What others must know of a head.

    layers: of the model, whose input is read; as many as there are stand for its last output, one more for that after
        the norm. before_levels: their input is read before deepstack was added to it.
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


class DraftHead(nn.Module):
    """embed_tokens: its own embedding, or None for the model's."""

    def __init__(self, sizes: DraftSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embed_tokens: nn.Embedding | None = None

    def forward(self, embeds: Tensor, hidden: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        """One row for each token. embeds, hidden: [T, D], of the next token and of this one. positions: int64 [3, T],
        by `DraftSizes.ahead`.

        Returns [T, D], for `draft` and as `hidden` of the row after it.
        """
        raise NotImplementedError

    def joined(self, states: Sequence[Tensor]) -> Tensor:
        """The hidden states of the model's layers, [T, D] each, as this head reads them: [T, D]."""
        raise NotImplementedError

    def draft(self, rows: Tensor) -> Tensor:
        """The most likely token after each of these outputs, [R, D], in the model's vocabulary: int64 [R]."""
        raise NotImplementedError


@contextmanager
def tapped(text: Any, head: DraftHead | None) -> Iterator[Callable[[], Tensor | None]]:
    """Reads for a head what a forward of a text model that runs meanwhile computes.

    Gives a function for after the forward: its rows as the head reads them, [T, D]; None without a head.
    """
    if head is None:
        yield lambda: None
        return
    found: dict[int, Tensor] = {}
    places, sizes = [*text.layers, text.norm], head.sizes
    hooks = [_tap(places, layer, sizes.before_levels, found) for layer in sizes.layers]
    try:
        yield lambda: head.joined([found[layer][0] for layer in sizes.layers])
    finally:
        for hook in hooks:
            hook.remove()


def _tap(places: Sequence[nn.Module], layer: int, before_levels: bool, found: dict[int, Tensor]) -> Any:
    """Puts the input of a layer into `found`, [1, T, D], whenever it is computed; without deepstack the output of the
    layer before."""

    def keep(rows: Any) -> None:
        found[layer] = rows[0] if isinstance(rows, tuple) else rows

    if layer and before_levels:
        return places[layer - 1].register_forward_hook(lambda _module, _inputs, output: keep(output))
    return places[layer].register_forward_pre_hook(lambda _module, inputs: keep(inputs))
