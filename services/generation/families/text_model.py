"""How a language model is made of a checkpoint.

It knows no family: a family's file says which of transformers' classes it is and what its weights are called.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from common.checkpoint import Checkpoint
from common.contract.errors import StartupError
from services.generation.model.attention import ATTENTION
from services.generation.model.language_model import LanguageModel
from services.generation.model.linears import pack_linears, packed
from services.generation.parallel.group import Group
from services.generation.parallel.sharding import Shard, check_sizes, layers_plan, shard

LM_HEAD_PREFIX = "lm_head."


def check_text(text_config: Any) -> None:
    """Raises StartupError for what this engine's attention lacks."""
    if getattr(text_config, "use_sliding_window", False):
        raise StartupError("text_config.use_sliding_window: sliding window attention is not supported")
    rope_type = dict(text_config.rope_parameters or {}).get("rope_type")
    if rope_type != "default":
        raise StartupError(f"text_config.rope_parameters.rope_type {rope_type!r} is not supported, only 'default'")


def make_text(text_class: Any, rotary_class: Any, text_config: Any, device: torch.device) -> Any:
    """A text model of transformers that waits for its weights, on the meta device but for its rotary embedding.

    Raises StartupError for what this engine's attention lacks.
    """
    check_text(text_config)
    text_config._attn_implementation = ATTENTION
    with torch.device("meta"):
        text = text_class(text_config)
    # Its frequencies are no weights: they are computed, which on the meta device they were not.
    text.rotary_emb = rotary_class(text_config).to(device)
    return text


def shard_text(text: Any, plan: Mapping[str, str] | None, group: Group | None) -> dict[str, Shard]:
    """Has a text model that waits for its weights compute this rank's part; what `read_weights` must know of it.

    plan: transformers' own. Raises StartupError if there is none, or heads that cannot be shared out.
    """
    if group is None:
        return {}
    check_sizes(text.config, group.ranks)
    return shard(text, layers_plan(text, plan, group.ranks), group)


def with_output_layer(
    checkpoint: Checkpoint, config: Any, text: Any, embed_levels: int, style: str, group: Group | None
) -> LanguageModel:
    """A text model that has its weights, with the output layer beside it.

    config: of the whole model. style: how the output layer is shared out, as transformers names it.
    Raises StartupError for missing weights.
    """
    sizes, weight = config.text_config, text.embed_tokens.weight
    with torch.device("meta"):
        lm_head: Any = nn.Linear(sizes.hidden_size, sizes.vocab_size, bias=False)
    shards = {} if group is None else _shard_output_layer(lm_head, style, group)
    if config.tie_word_embeddings:
        lm_head.weight = nn.Parameter(shards["weight"].of(weight.detach())) if shards else weight
    else:
        weights = read_weights(checkpoint, LM_HEAD_PREFIX, weight.dtype, weight.device, shards)
        fill(lm_head, weights, LM_HEAD_PREFIX)
    return assemble(config, text, lm_head, embed_levels, 1 if group is None else group.ranks)


def assemble(config: Any, text: Any, lm_head: Any, embed_levels: int, ranks: int = 1) -> LanguageModel:
    """A language model of its parts, which have their weights; those of one of several `ranks` are its own.

    config: of the whole model.
    """
    sizes = config.text_config
    if ranks == 1:  # what ranks do around a linear layer has no place around a packed one
        pack_linears(text)
        lm_head = packed(lm_head)
    return LanguageModel(
        text=text.train(False).requires_grad_(False),
        embed_tokens=text.embed_tokens,
        lm_head=lm_head.requires_grad_(False),
        layers=sizes.num_hidden_layers,
        heads=sizes.num_attention_heads // ranks,
        kv_heads=sizes.num_key_value_heads // ranks,
        head_dim=text.layers[0].self_attn.head_dim,
        context_tokens=sizes.max_position_embeddings,
        embed_levels=embed_levels,
    )


def _shard_output_layer(lm_head: nn.Module, style: str, group: Group) -> dict[str, Shard]:
    shards = shard(nn.ModuleDict({"lm_head": lm_head}), {"lm_head.weight": style, "lm_head": style}, group)
    return {name.removeprefix(LM_HEAD_PREFIX): each for name, each in shards.items()}


def has_weights(checkpoint: Checkpoint, prefix: str) -> bool:
    """Whether any weight's name starts with `prefix`."""
    for path in checkpoint.weight_files:
        with safe_open(path, framework="pt") as file:
            if any(name.startswith(prefix) for name in file.keys()):  # noqa: SIM118  (not a dict)
                return True
    return False


def read_weights(
    checkpoint: Checkpoint, prefix: str, dtype: torch.dtype, device: torch.device, shards: Mapping[str, Shard]
) -> dict[str, Tensor]:
    """The tensors whose names start with `prefix`, under the rest of their names; of those in `shards`, a part.

    Raises StartupError if one of these has another shape than the config says.
    """
    weights: dict[str, Tensor] = {}
    for path in checkpoint.weight_files:
        with safe_open(path, framework="pt", device=str(device)) as file:
            for full in file.keys():  # noqa: SIM118  (not a dict)
                name = full.removeprefix(prefix)
                if not full.startswith(prefix):
                    continue
                try:
                    own = shards[name].of(file.get_slice(full)) if name in shards else file.get_tensor(full)
                except ValueError as error:
                    raise StartupError(f"config.json wants {full} {error}") from error
                weights[name] = own.to(dtype)
    return weights


def fill(module: nn.Module, weights: dict[str, Tensor], prefix: str) -> None:
    """Puts `weights` in place of a module's own. Raises StartupError, naming them, if names or shapes differ."""
    shapes = {name: tensor.shape for name, tensor in module.state_dict().items()}
    missing = [prefix + name for name in sorted(shapes.keys() - weights.keys())]
    unknown = [prefix + name for name in sorted(weights.keys() - shapes.keys())]
    if missing or unknown:
        raise StartupError(
            f"config.json and the weights disagree: missing weights {missing}, unknown weights {unknown}"
        )
    for name, shape in shapes.items():
        if weights[name].shape != shape:
            raise StartupError(f"config.json wants {prefix + name} {list(shape)}, it is {list(weights[name].shape)}")
    module.load_state_dict(weights, assign=True)
