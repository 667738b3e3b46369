"""What a LoRA adapter adds to a linear layer. Source: LoRA, arXiv 2106.09685."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from torch import Tensor
from torch.nn import functional as F

from gridsieve.common.contract.errors import InvalidRequest

T = TypeVar("T")


class Features(NamedTuple):
    """The sizes of a linear layer."""

    inputs: int
    outputs: int


@dataclass(frozen=True, slots=True)
class LowRank:
    """What an adapter adds to a layer. down: [r, in_features]; up: [out_features, r], with the scaling included.

    Under tensor parallelism each matrix covers only this rank's features. total: the all-reduce after `down` if the
    layer's inputs are sharded, else None.
    """

    down: Tensor
    up: Tensor
    total: Callable[[Tensor], Tensor] | None = None

    def of(self, rows: Tensor) -> Tensor:
        """rows: [.., in_features]; returns [.., out_features]."""
        inner = F.linear(rows, self.down)
        return F.linear(self.total(inner) if self.total else inner, self.up)


def named_adapter(name: str, loaded: Mapping[str, T], service: str) -> T:
    """The loaded adapter of this name. Raises InvalidRequest if the service has not loaded it."""
    if name not in loaded:
        none = f"unset, because {service} has loaded none (--adapters)"
        raise InvalidRequest(field="adapter", limit=f"one of {', '.join(loaded)}" if loaded else none, value=name)
    return loaded[name]
