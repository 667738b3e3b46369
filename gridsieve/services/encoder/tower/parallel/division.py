"""Divides the layers of a tower among ranks: each has some heads of every attention and some columns of every MLP.

    rank 0   rows ─┬─▶ qkv ─▶ its heads ─▶ proj ─┐      ┌─▶ fc1 ─▶ fc2 ─┐
                                                (+) ─▶ ─┤              (+) ─▶ rows, alike on every rank
    rank 1   rows ─┴─▶ qkv ─▶ its heads ─▶ proj ─┘      └─▶ fc1 ─▶ fc2 ─┘

Each (+) adds up what the ranks have computed. All else, such as the patch embedding and the mergers, is whole on every
rank. transformers' styles, by which generation divides text models, have none for queries, keys and values that are one
matrix with a bias, and their hooks exclude compiling and `compute.packed_linear`.
Source: Megatron-LM, arXiv 1909.08053.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gridsieve.common.contract.errors import StartupError
from gridsieve.services.compute.parts import part

# A rank's part of a weight.
Cut: TypeAlias = Callable[[Tensor], Tensor]

# Layers of which a rank has some outputs, and how many matrices are one there.
_OUTPUTS = {"qkv": 3, "fc1": 1, "linear_fc1": 1, "gate_proj": 1, "up_proj": 1}
# Layers of which a rank has some inputs.
_INPUTS = ("proj", "fc2", "linear_fc2", "down_proj")

_numbers = count()


class Share:
    """One of so many ranks' share of a tower.

    group: of torch.distributed. Until it is set, sums are of this rank alone: so layers can be compiled on each rank
    for itself.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.group: Any = None
        self.number = next(_numbers)
        _shares[self.number] = self

    def part(self, whole: Tensor, axis: int) -> Tensor:
        return part(whole, axis, self.rank, self.ranks)

    def total(self, rows: Tensor) -> Tensor:
        """The sum of the tensors of all ranks, which have one shape."""
        total = rows.clone()
        if self.group is not None:
            self.group.allreduce([total]).wait()
        return total


class SummedLinear(nn.Linear):
    """A linear layer of which each rank has some inputs: adds up the products of all ranks, then its bias."""

    share: Share

    def forward(self, rows: Tensor) -> Tensor:
        product: Tensor = torch.ops.gridsieve.sum_of_ranks(F.linear(rows, self.weight), self.share.number)
        return product if self.bias is None else product + self.bias


def divide(layers: nn.Module, share: Share, prefix: str) -> dict[str, Cut]:
    """Turns layers on the meta device into this rank's share of them.

    Returns how the weights of a checkpoint are cut, by their names after `prefix`. Raises StartupError if heads cannot
    be divided evenly; columns may be.
    """
    cuts: dict[str, Cut] = {}
    for name, module in layers.named_modules():
        if heads := getattr(module, "num_heads", None):
            if heads % share.ranks:
                raise StartupError(
                    f"--tower-tensor-parallel {share.ranks} must divide the {heads} attention heads of the vision tower"
                )
            module.num_heads = heads // share.ranks
        if isinstance(module, nn.Linear):
            own = _cuts_of(module, name.rpartition(".")[2], share)
            for each, cut in own.items():
                setattr(module, each, nn.Parameter(cut(getattr(module, each).data), requires_grad=False))
                cuts[f"{prefix}{name}.{each}"] = cut
            module.out_features, module.in_features = module.weight.shape
    return cuts


def _cuts_of(linear: nn.Linear, name: str, share: Share) -> dict[str, Cut]:
    """How its parameters are cut, by name; makes it sum where a rank has some of its inputs."""
    if name in _INPUTS:
        linear.__class__ = SummedLinear
        linear.share = share  # type: ignore[assignment]  # torch types a module's fields as tensors or modules
        return {"weight": partial(share.part, axis=1)}
    cut = partial(_part_of_each, matrices=_OUTPUTS[name], share=share)
    return {"weight": cut} if linear.bias is None else {"weight": cut, "bias": cut}


def _part_of_each(whole: Tensor, matrices: int, share: Share) -> Tensor:
    return torch.cat([share.part(each, 0) for each in whole.chunk(matrices)])


# An operator of its own is opaque to the compiler. All layers of a tower name one share, so they share one code.
_shares: WeakValueDictionary[int, Share] = WeakValueDictionary()
_library = torch.library.Library("gridsieve", "FRAGMENT")
_library.define("sum_of_ranks(Tensor rows, int share) -> Tensor")
_library.impl("sum_of_ranks", lambda rows, share: _shares[share].total(rows), "CPU")
_library.impl("sum_of_ranks", lambda rows, share: _shares[share].total(rows), "CUDA")
_library.impl("sum_of_ranks", lambda rows, share: torch.empty_like(rows), "Meta")
