"""Experts that a checkpoint stores quantised, one by one or stacked.

    one by one   experts.0.gate_proj.weight [I, D]   up_proj [I, D]   down_proj [D, I]
    stacked      experts.gate_up_proj [E, 2 · I, D]                   down_proj [E, D, I]; or with their last two axes
                 swapped. Their scales have `_scale_inv` after the name

They become `SeparateExperts`, whose layers are loaded like other linear layers. Each rank reads its own.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import partial
from typing import Any

from torch import Tensor

from gridsieve.services.generation.loading.weights import Named
from gridsieve.services.generation.model.separate_experts import SeparateExperts
from gridsieve.services.generation.parallel.group import Group
from gridsieve.services.generation.parallel.sharding import Shard, rows_of

_SINGLE = re.compile(r"(.+\.experts)\.(\d+)\.")
_STACKED = re.compile(r"(.+\.experts)\.(gate_up_proj|up_proj|down_proj)")
_PLAIN = re.compile(r"experts\.(\d+\.)?(gate_up|gate|up|down)_proj(\.weight)?")


def is_quantised_expert(name: str) -> bool:
    """Whether a weight of this name is of an expert, and stored otherwise than as a plain matrix."""
    _, experts, own = name.partition(".experts.")
    return bool(experts) and not _PLAIN.fullmatch(experts[1:] + own)


def separate_experts(text: Any, stored: Collection[str], group: Group | None) -> dict[str, list[str]]:
    """Replaces the experts of `text`, on the meta device, that are among the quantised weights `stored`.

    stored: names of weights. Returns the names of this rank's layers that are stored stacked, by the name of their
    weight.
    """
    single = {found[1] for name in stored if (found := _SINGLE.match(name))}
    stacked: dict[str, list[str]] = {}
    for name, module in list(text.named_modules()):
        if getattr(getattr(module, "down_proj", None), "ndim", 0) != 3:
            continue
        layers = [each for each in ("gate_up_proj", "up_proj", "down_proj") if f"{name}.{each}" in stored]
        if name in single or layers:
            ranks = (group.rank, group.ranks) if group else ()
            experts = SeparateExperts(module, bool(layers), *ranks)
            text.set_submodule(name, experts)
            stacked |= {f"{name}.{layer}": [f"{name}.{number}.{layer}" for number in experts.own] for layer in layers}
    return stacked


def without_others(text: Any, named: Named) -> Named:
    """`named`, but of other ranks' `SeparateExperts` nothing is read where they are stored one by one."""
    others = {name: set(range(each.count)) - set(each.own) for name, each in _separate(text).items()}

    def own(stored: str) -> str | None:
        name = named(stored)
        found = _SINGLE.match(name or "")
        return None if found and int(found[2]) in others.get(found[1], ()) else name

    return own


def stacked_shards(text: Any, stored: Collection[str]) -> dict[str, Shard]:
    """This rank's part of those of the weights `stored`, and of their scales, that are stacked `SeparateExperts`."""
    separate = _separate(text)
    experts = {name: separate[found[1]] for name in stored if (found := _STACKED.match(name)) and found[1] in separate}
    return {name: Shard((each.count,), partial(rows_of, each.own)) for name, each in experts.items()}


def _separate(text: Any) -> dict[str, SeparateExperts]:
    return {name: each for name, each in text.named_modules() if isinstance(each, SeparateExperts)}


def unstack(text: Any, weights: dict[str, Tensor], scale: str) -> None:
    """Gives each of the `SeparateExperts` its own part of stacked weights and their scales, instead of these.

    scale: what follows a weight's name in the name of its scales.
    """
    separate = _separate(text)
    for stacked in list(weights):
        found = _STACKED.fullmatch(stacked)
        if not found or found[1] not in separate:
            continue
        name, layer = found.groups()
        experts = separate[name]
        shapes = [each.get_submodule(layer).weight.shape for each in experts.values()]
        swapped = weights[stacked].shape[1:] not in shapes and weights[stacked].mT.shape[1:] in shapes
        for part in [each for each in ("", scale) if stacked + each in weights]:
            for number, own in zip(experts.own, weights.pop(stacked + part), strict=True):
                weights[f"{name}.{number}.{layer}.weight{part}"] = own.mT.contiguous() if swapped else own
