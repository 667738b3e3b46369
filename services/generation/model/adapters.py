"""LoRA adapters: low-rank additions to a language model's linear layers, for those rows of a forward that want them.

    rows of a packed batch:   [ none | none | a | b | none | a a a a ]
    what a layer computes:    W x of every row, and of each adapter B(A(x)) on its own rows

It owns which adapters there are and whose rows a forward has; how they are read is `adapter_files`' business.
Source: LoRA, arXiv 2106.09685.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from common.contract.errors import InvalidRequest
from services.generation.request.batch import AdaptedRows
from services.generation.request.request import Adapter

_NAME_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class LowRank:
    """What an adapter adds to a layer. down: [r, in_features]; up: [out_features, r], its scaling within.

    Where several ranks compute a layer, either is of this rank's features alone. total: adds up over them what `down`
    makes of theirs; None where each has all.
    """

    down: Tensor
    up: Tensor
    total: Callable[[Tensor], Tensor] | None = None

    def of(self, rows: Tensor) -> Tensor:
        """rows: [.., in_features]; returns [.., out_features]."""
        inner = F.linear(rows, self.down)
        return F.linear(self.total(inner) if self.total else inner, self.up)


class Adapters:
    """Those that are loaded.

    rows: those of the forward that runs; whoever runs it says them, and layers read them.
    """

    def __init__(self) -> None:
        self.rows: tuple[AdaptedRows, ...] = ()
        self._by_name: dict[str, Adapter] = {}

    def find(self, name: str) -> Adapter:
        """Raises InvalidRequest for a name that no adapter has."""
        if name not in self._by_name:
            known = f"one of {', '.join(self._by_name)}" if self._by_name else "unset, for none is loaded (--adapters)"
            raise InvalidRequest(f"adapter must be {known}, got {name[:_NAME_CHARACTERS]!r}")
        return self._by_name[name]

    def add(self, adapter: Adapter, text: nn.Module, additions: Mapping[str, LowRank]) -> None:
        """Has layers of `text`, by their names in it, compute what the adapter adds, wherever rows are its own."""
        for name, addition in additions.items():
            parent, _, own = name.rpartition(".")
            layer = text.get_submodule(name)
            if not isinstance(layer, AdaptedLinear):
                layer = AdaptedLinear(layer, self)
                setattr(text.get_submodule(parent), own, layer)
            layer.additions[adapter.digest] = addition
        self._by_name[adapter.name] = adapter


NO_ADAPTERS = Adapters()


class AdaptedLinear(nn.Module):
    """A layer, and what adapters add to it: [1, T, in_features] to [1, T, out_features]."""

    def __init__(self, layer: nn.Module, adapters: Adapters) -> None:
        super().__init__()
        self.layer = layer
        self.additions: dict[bytes, LowRank] = {}
        self._adapters = adapters

    def forward(self, states: Tensor) -> Tensor:
        computed: Tensor = self.layer(states)
        for rows in self._adapters.rows:
            if addition := self.additions.get(rows.digest):
                computed[:, rows.start : rows.end] += addition.of(states[:, rows.start : rows.end])
        return computed
