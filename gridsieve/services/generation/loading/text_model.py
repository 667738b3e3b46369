"""Builds a language model of transformers' text class and an output layer, whole or one rank's part of it.

It knows no model family: their files name transformers' classes and the prefixes of weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.common.fields import refusing
from gridsieve.services.compute.packed_linear import join_linears, pack_linears, packed
from gridsieve.services.generation.loading.int4 import Int4Format, Int4Layers
from gridsieve.services.generation.loading.weights import fill, has_weights, read_weights
from gridsieve.services.generation.model.attention import ATTENTION
from gridsieve.services.generation.model.experts import EXPERTS, waits
from gridsieve.services.generation.model.fused_layers import fuse_layers
from gridsieve.services.generation.model.language_model import LanguageModel
from gridsieve.services.generation.model.layers import attention_layers, number_layers
from gridsieve.services.generation.model.norms import fuse_norms
from gridsieve.services.generation.parallel.group import Group
from gridsieve.services.generation.parallel.sharding import Shard, layers_plan, shard

# Of transformers 5, of published checkpoints whose language model is a whole model of its own, and of models that also
# speak.
LM_HEAD_PREFIXES = ("lm_head.", "language_model.lm_head.", "llm.lm_head.", "thinker.lm_head.")
# Of layers with recurrent states, in the order in which they are multiplied.
RECURRENT_INPUTS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
# Frequencies that do not change with the length of the context. Those of longrope change at a length.
_ROPE_TYPES = ("default", "llama3", "longrope")


def check_text(text_config: Any) -> None:
    """Raises StartupError for what this engine's attention lacks."""
    # Mistral's windows have no switch.
    switch = "use_sliding_window" if hasattr(text_config, "use_sliding_window") else "sliding_window"
    if getattr(text_config, switch, None):
        raise StartupError(f"text_config.{switch}: sliding window attention is not supported")
    if not hasattr(text_config, "rope_parameters"):  # nothing in the model knows positions
        return
    rope = dict(text_config.rope_parameters or {})
    rope_type = rope.get("rope_type")
    if rope_type not in _ROPE_TYPES:
        raise StartupError(
            f"text_config.rope_parameters.rope_type {rope_type!r} is not supported, only {', '.join(_ROPE_TYPES)}"
        )
    if rope_type == "longrope":
        longest, trained = text_config.max_position_embeddings, rope.get("original_max_position_embeddings")
        if trained is None or longest > trained:
            raise StartupError(
                f"text_config.max_position_embeddings {longest} must be at most {trained}, its rope_parameters."
                f"original_max_position_embeddings: longrope's frequencies of longer contexts are not supported"
            )


def make_text(text_class: Any, rotary_class: Any, text_config: Any, device: torch.device) -> Any:
    """A text model of transformers without weights: on the meta device, except its rotary embedding, if it has one.

    Raises StartupError for what this engine's attention lacks.
    """
    check_text(text_config)
    text_config._attn_implementation = ATTENTION
    with torch.device("meta"), refusing("config.json"):
        text = text_class(text_config)
    if rotary_class is not None:
        # The frequencies are not in the checkpoint; they are computed at construction, which the meta device skips.
        text.rotary_emb = rotary_class(text_config).to(device)
    return text


def in_float32(text: Any, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The dtypes of weights that transformers keeps in float32 beside others in `dtype`, by name: those of a router."""
    kept = tuple(f".{name}" for name in text._keep_in_fp32_modules_strict or ())
    return {name: torch.float32 for name in text.state_dict() if dtype.itemsize == 2 and name.endswith(kept)}


def shard_text(text: Any, plan: Mapping[str, str] | None, group: Group | None) -> dict[str, Shard]:
    """Shards a text model on the meta device and returns this rank's parts for `read_weights`; {} without a group.

    plan: transformers' tensor-parallel plan. Raises StartupError if there is none.
    """
    if group is None:
        return {}
    return shard(text, layers_plan(text, plan, group.ranks), group, text.config.num_key_value_heads)


def read_output_layer(
    checkpoint: Checkpoint,
    config: Any,
    weight: nn.Parameter,
    how: Int4Format | None,
    style: str = "",
    group: Group | None = None,
) -> Any:
    """The output layer of a checkpoint; with a group, this rank's part of it.

    config: of the whole model. weight: [V, D], the embeddings of its text model. how: the format of layers in 4 bits,
    if any; the output layer stays in 4 bits if it is stored so, and is never rounded to them. style: transformers'
    tensor-parallel style of the output layer. As in transformers, an output layer that the checkpoint has is used even
    if the config says that it is the embedding: configs of InternVL say nothing, and that is the default of
    transformers' class.
    Raises StartupError for missing weights.
    """
    sizes = config.text_config
    with torch.device("meta"):
        lm_head: Any = nn.Linear(sizes.hidden_size, sizes.vocab_size, bias=False)
    prefix = next((each for each in LM_HEAD_PREFIXES if has_weights(checkpoint, each)), LM_HEAD_PREFIXES[0])
    layers = None
    if how is not None and how.needed != ("weight",):
        layers = Int4Layers(checkpoint, nn.ModuleDict({"lm_head": lm_head}), prefix.removesuffix("lm_head."), how)
    shards = {} if group is None else _shard_output_layer(lm_head, style, group)
    if layers:
        layers.pack(weight.dtype, weight.device, {f"lm_head.{name}": each for name, each in shards.items()})
    else:
        weights = read_weights(checkpoint, prefix, weight.dtype, weight.device, shards)
        tied = nn.Parameter(shards["weight"].of(weight.detach())) if shards else weight
        if config.tie_word_embeddings and (not weights or torch.equal(weights["weight"], tied)):
            lm_head.weight = tied
        else:
            fill(lm_head, weights, prefix)
    return lm_head


def assemble(config: Any, text: Any, lm_head: Any, embed_levels: int, ranks: int = 1) -> LanguageModel:
    """A language model made of a text model and an output layer, or of one rank's parts of these.

    config: of the whole model.
    """
    sizes = config.text_config
    if hasattr(text, "rotary_emb") and text.rotary_emb.rope_type == "longrope":
        # Its short frequencies, which it has, are right for every position; its forward would choose by the largest
        # one of the whole batch.
        text.rotary_emb.rope_type = "default"
    has_experts = hasattr(sizes, "num_experts") or hasattr(sizes, "num_local_experts")
    if has_experts and waits(text.embed_tokens.weight):
        text.config._experts_implementation = EXPERTS
    states = number_layers(text)
    attention = attention_layers(text)
    make_ready(text, ranks)
    if ranks == 1:
        lm_head = packed(lm_head)
    return LanguageModel(
        text=text,
        embed_tokens=text.embed_tokens,
        lm_head=lm_head.requires_grad_(False),
        layers=len(attention),
        heads=sizes.num_attention_heads // ranks,
        kv_heads=-(-sizes.num_key_value_heads // ranks),
        head_dim=attention[0].head_dim,
        context_tokens=sizes.max_position_embeddings,
        embed_levels=embed_levels,
        states=states,
    )


def make_ready(text: Any, ranks: int = 1) -> None:
    """Gives numbered layers with weights the fastest forms for their device."""
    fuse_norms(text)
    fuse_layers(text)
    if ranks == 1:  # packing would drop the hooks of transformers' tensor parallelism
        # Of recurrent layers in 4 bits the gates, the last two, are not.
        recurrent = (RECURRENT_INPUTS, RECURRENT_INPUTS[:2], RECURRENT_INPUTS[2:])
        join_linears(text, ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), *recurrent)
        pack_linears(text)
    text.train(False).requires_grad_(False)


def _shard_output_layer(lm_head: nn.Module, style: str, group: Group) -> dict[str, Shard]:
    shards = shard(nn.ModuleDict({"lm_head": lm_head}), {"lm_head.weight": style, "lm_head": style}, group)
    return {name.removeprefix("lm_head."): each for name, each in shards.items()}
