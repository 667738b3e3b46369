"""Experts that a checkpoint stores quantised, one by one or stacked.

    one by one   experts.0.gate_proj.weight [I, D]   up_proj [I, D]   down_proj [D, I]
    stacked      experts.gate_up_proj [E, 2 · I, D]                   down_proj [E, D, I]; or with their last two axes
                 swapped. Their scales have `_scale_inv` after the name

They become `SeparateExperts`, whose layers are loaded like other linear layers.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from torch import Tensor

from gridsieve.services.generation.model.separate_experts import SeparateExperts

_SINGLE = re.compile(r"(.+\.experts)\.\d+\.")
_STACKED = re.compile(r"(.+\.experts)\.(gate_up_proj|up_proj|down_proj)")
_PLAIN = re.compile(r"experts\.(\d+\.)?(gate_up|gate|up|down)_proj(\.weight)?")


def is_quantised_expert(name: str) -> bool:
    """Whether a weight of this name is of an expert, and stored otherwise than as a plain matrix."""
    _, experts, own = name.partition(".experts.")
    return bool(experts) and not _PLAIN.fullmatch(experts[1:] + own)


def separate_experts(text: Any, stored: Collection[str]) -> dict[str, list[str]]:
    """Replaces the experts of `text`, on the meta device, that are among the quantised weights `stored`.

    stored: names of weights. Returns the names of the layers that are stored stacked, by the name of their weight.
    """
    single = {found[1] for name in stored if (found := _SINGLE.match(name))}
    stacked = {}
    for name, module in list(text.named_modules()):
        if getattr(getattr(module, "down_proj", None), "ndim", 0) != 3:
            continue
        layers = [each for each in ("gate_up_proj", "up_proj", "down_proj") if f"{name}.{each}" in stored]
        if name in single or layers:
            text.set_submodule(name, SeparateExperts(module, joined=bool(layers)))
        for layer in layers:
            stacked[f"{name}.{layer}"] = [f"{name}.{number}.{layer}" for number in range(len(module.down_proj))]
    return stacked


def unstack(text: Any, weights: dict[str, Tensor], scale: str) -> None:
    """Gives each of the `SeparateExperts` its own part of stacked weights and their scales, instead of these.

    scale: what follows a weight's name in the name of its scales.
    """
    separate = {name: each for name, each in text.named_modules() if isinstance(each, SeparateExperts)}
    for stacked in list(weights):
        found = _STACKED.fullmatch(stacked)
        if not found or found[1] not in separate:
            continue
        name, layer = found.groups()
        shape = separate[name][0].get_submodule(layer).weight.shape
        swapped = weights[stacked].shape[1:] != shape and weights[stacked].mT.shape[1:] == shape
        for part in [each for each in ("", scale) if stacked + each in weights]:
            for number, own in enumerate(weights.pop(stacked + part)):
                weights[f"{name}.{number}.{layer}.weight{part}"] = own.mT.contiguous() if swapped else own
