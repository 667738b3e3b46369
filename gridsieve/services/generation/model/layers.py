"""The layers of a text model by kind: those with keys and values, and those with recurrent states."""

from __future__ import annotations

from typing import Any

from gridsieve.services.generation.model.delta_net import GatedDeltaNet
from gridsieve.services.generation.model.mamba2 import Mamba2
from gridsieve.services.generation.model.states import StateSizes


def attention_layers(text: Any) -> list[Any]:
    return [mixer for mixer in _mixers(text) if hasattr(mixer, "k_proj")]


def number_layers(text: Any) -> StateSizes | None:
    """Numbers the layers of a text model by kind, from 0 each, and returns the sizes of its states, if it has any.

    The caches know nothing of layers of the other kind.
    """
    recurrent = [mixer for mixer in _mixers(text) if hasattr(mixer, "conv1d")]
    for layers in (attention_layers(text), recurrent):
        for number, layer in enumerate(layers):
            layer.layer_idx = number
    for layer in recurrent:
        layer.__class__ = GatedDeltaNet if hasattr(layer, "in_proj_qkv") else Mamba2
    sizes: StateSizes | None = recurrent[0].sizes(len(recurrent)) if recurrent else None
    return sizes


def _mixers(text: Any) -> list[Any]:
    """What mixes tokens, under transformers' names. In some models a feed-forward is a block's `mixer`, too."""
    names = ("self_attn", "linear_attn", "mixer")
    return [getattr(layer, name) for layer in text.layers for name in names if hasattr(layer, name)]
