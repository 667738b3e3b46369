"""LoRA adapters: low-rank additions to the linear layers of a language model, applied to selected rows of a batch.

    rows of a packed batch:   [ none | none | a | b | none | a a a a ]
    a layer computes:         W x for every row, plus B(A(x)) of each adapter for its own rows

This module owns the loaded adapters and the row ranges of the current forward; `startup.adapters` loads them.
Source: LoRA, arXiv 2106.09685.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from gridsieve.services.compute.adapters import LowRank, named_adapter
from gridsieve.services.generation.request.batch import AdaptedRows
from gridsieve.services.generation.request.request import Adapter


class Adapters:
    """The loaded adapters. rows: row ranges of the current forward, set by the runner and read by the layers.

    of_all_rows: an adapter's product is always of all rows, so its kernel does not depend on how many are adapted.
    """

    def __init__(self) -> None:
        self.rows: tuple[AdaptedRows, ...] = ()
        self.of_all_rows = False
        self._by_name: dict[str, Adapter] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._by_name)

    def find(self, name: str) -> Adapter:
        """Raises InvalidRequest for a name that is not loaded."""
        return named_adapter(name, self._by_name, "generation")

    def attach(self, adapter: Adapter, text: nn.Module, additions: Mapping[str, LowRank]) -> None:
        """Wraps the named layers of `text` so that they add the adapter's output to its rows."""
        for name, addition in additions.items():
            parent, _, own = name.rpartition(".")
            layer = text.get_submodule(name)
            if not isinstance(layer, AdaptedLinear):
                layer = AdaptedLinear(layer, self)
                setattr(text.get_submodule(parent), own, layer)
            layer.additions[adapter.digest] = addition
        self._by_name[adapter.name] = adapter


class AdaptedLinear(nn.Module):
    """A linear layer with additions by adapter digest: [.., T, in_features] to [.., T, out_features]."""

    def __init__(self, layer: nn.Module, adapters: Adapters) -> None:
        super().__init__()
        self.layer = layer
        self.additions: dict[bytes, LowRank] = {}
        self._adapters = adapters

    def forward(self, states: Tensor) -> Tensor:
        computed: Tensor = self.layer(states)
        for rows in self._adapters.rows:
            if addition := self.additions.get(rows.digest):
                own = slice(rows.start, rows.end)
                if self._adapters.of_all_rows:
                    computed[..., own, :] += addition.of(states)[..., own, :]
                else:
                    computed[..., own, :] += addition.of(states[..., own, :])
        return computed
