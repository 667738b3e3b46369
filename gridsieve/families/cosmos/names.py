"""Names of the weights of Cosmos 3 Edge: those in its files, and those of transformers' modules.

    published                model.visual.encoder.layers.0.mlp.fc1        layers.0.mlp.up_proj
    saved by transformers    model.visual.encoder.layers.0.mlp.up_proj    layers.0.mlp.up_proj
    of the modules           model.visual.encoder.layers.0.mlp.fc1        model.language_model.layers.0.mlp.fc1

Source: `conversion_mapping` of transformers 5.24; nvidia/Cosmos3-Edge.
"""

from __future__ import annotations

from collections.abc import Mapping

_OWN: Mapping[str, str] = {
    ".self_attn.to_q.": ".self_attn.q_proj.",
    ".self_attn.to_k.": ".self_attn.k_proj.",
    ".self_attn.to_v.": ".self_attn.v_proj.",
    ".self_attn.to_out.": ".self_attn.o_proj.",
    ".mlp.up_proj.": ".mlp.fc1.",
    ".mlp.down_proj.": ".mlp.fc2.",
}


def own_name(name: str) -> str:
    """The name of a weight within its module of transformers. Names of modules are their own."""
    for stored, own in _OWN.items():
        name = name.replace(stored, own)
    return name
